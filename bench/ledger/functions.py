"""The functions that the table of claims may name."""

from bench.ledger import algebra, micro, micro_attention, micro_position, published, timing, trained

MODULES = (algebra, micro, micro_attention, micro_position, published, timing, trained)
FUNCTIONS = {
    name: function
    for module in MODULES
    for name, function in vars(module).items()
    if callable(function) and getattr(function, "__module__", "") == module.__name__
}
