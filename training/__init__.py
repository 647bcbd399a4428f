"""What a training run needs around the loop in train.py."""
