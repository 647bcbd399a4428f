"""What writing text needs around sample.py."""
