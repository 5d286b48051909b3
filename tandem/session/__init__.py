"""What a control loop is handed."""
