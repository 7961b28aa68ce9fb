"""A device for machines without a GPU: its tensors refuse those of the CPU, and what crosses is
counted.

They say that they are on "meta", torch's device without data, and have their data in `inner`, on
the CPU.
"""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE, CPU = torch.device("meta", 0), torch.device("cpu")


class OnDevice(torch.Tensor):
    """A tensor of the device. What is done with it is done by Device."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        layout = inner.shape, inner.stride(), inner.storage_offset()
        return cls._make_wrapper_subclass(cls, *layout, dtype=inner.dtype, device=DEVICE)

    def __init__(self, inner: torch.Tensor):
        self.inner = inner

    __torch_dispatch__ = None

    def __deepcopy__(self, memo) -> torch.Tensor:
        copied = self.detach().clone()
        return torch.nn.Parameter(copied) if isinstance(self, torch.nn.Parameter) else copied

    def __reduce_ex__(self, protocol):  # a file has the data
        return self.inner.__reduce_ex__(protocol)

    def tolist(self) -> list:
        return self.cpu().tolist()


class Device(TorchDispatchMode):
    """Within it, `.to(DEVICE)` gives an OnDevice.

    crossed counts the transfers "to" the device and "from" it, among them .item() and what a
    result's shape depends on. A GPU is waited for until each is done.
    """

    def __init__(self):
        super().__init__()
        self.crossed = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given, name = (args, kwargs or {}), func.overloadpacket.__name__
        leaves = tree_leaves(given)
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        is_there = [isinstance(x, OnDevice) for x in tensors]
        targets = [x.type == DEVICE.type for x in leaves if isinstance(x, torch.device)]
        goes_there = targets[0] if targets else is_there[0] if name == "copy_" else any(is_there)
        if targets or name == "copy_":
            if is_there and goes_there != is_there[-1]:
                self.crossed["to" if goes_there else "from"] += 1
        elif any(is_there):
            if not all(there or x.dim() == 0 for there, x in zip(is_there, tensors)):
                raise RuntimeError(f"{name}: a tensor of the CPU among the device's")
            by_data = torch.Tag.dynamic_output_shape in func.tags
            if name == "index":  # by numbers, whose count is known, or by a mask
                by_data = any(x.dtype == torch.bool for x in tensors[1:])
            if by_data or torch.Tag.data_dependent_output in func.tags:
                self.crossed["from"] += 1
        owners = {
            id(x.inner): x for x in tensors if isinstance(x, OnDevice)
        }  # what is changed in place stays itself
        given = tree_map_only(
            OnDevice, lambda x: x.inner, tree_map_only(torch.device, lambda x: CPU, given)
        )
        result = func(*given[0], **given[1])
        if goes_there:
            result = tree_map_only(
                torch.Tensor, lambda x: owners[id(x)] if id(x) in owners else OnDevice(x), result
            )
        return result
