"""The parts of a decoder block, what they cost, and the model made of them."""
