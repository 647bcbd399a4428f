"""Everything beside the mission: each file or folder is one command, and may be deleted."""
