"""From a plan to the parts that a loop is handed."""
