"""The micro-batches of the next step, ready before the device needs them."""

from concurrent.futures import ThreadPoolExecutor

import torch


def to_device(array, device):
    """A numpy array as a tensor on the device. A copy to a GPU is queued from pinned memory, so
    that nothing waits for it."""
    tensor = torch.from_numpy(array)
    if device.startswith("cuda"):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Feeder:
    """Reads batches in a thread: the next ones while the device computes with the last ones."""

    def __init__(self, batches):
        self.batches = batches
        self.thread = ThreadPoolExecutor(1, "feeder")
        self.ahead = None  # (places, future of their micro-batches) of the step that comes next

    def take(self, places, following, device):
        """The micro-batches at `places`, [(first sample, number of samples), ...]: a list of (x, y,
        number of targets), x and y (samples, block_size) int64 on the device; of preferences (x, y,
        reference, number of tokens). Begins to read those at `following`. Raises Failure as
        Batches.get does."""
        if self.ahead is None or self.ahead[0] != (places, device):
            self.start(places, device)
        micro_batches = self.ahead[1].result()
        self.start(following, device)
        return micro_batches

    def start(self, places, device):
        """Read the micro-batches at `places` in the thread."""
        self.ahead = (places, device), self.thread.submit(self.read, places, device)

    def read(self, places, device):
        if device.startswith("cuda"):
            torch.cuda.set_device(device)  # each thread has its own
        micro_batches = []
        for first, count in places:
            arrays = self.batches.get(first, count)
            y = arrays[1]
            targets = int((y >= 0).sum()) if self.batches.masked else y.size
            micro_batches.append((*(to_device(array, device) for array in arrays), targets))
        return micro_batches
