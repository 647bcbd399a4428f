"""The page on which one or two models write token by token."""
