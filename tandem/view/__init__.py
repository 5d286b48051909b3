"""A local page over run folders: ``tandem view``. It reads what runs write, and writes nothing into them."""
