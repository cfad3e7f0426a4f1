"""What is learned of a target before training: its modes, chains around them, coordinates."""
