"""The insides of compare.py: run folders read side by side, and their page."""
