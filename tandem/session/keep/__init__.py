"""What a run keeps of what it trains, also where there is no room for it."""
