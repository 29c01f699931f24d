"""Qualified names: what an import binds, and what well-known names mean in code that imports nothing."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

#: What these names mean where the file never binds them: snippets and notebooks leave out their imports.
CONVENTIONS = {
    "torch": "torch",
    "nn": "torch.nn",
    "F": "torch.nn.functional",
    "optim": "torch.optim",
    "np": "numpy",
    "numpy": "numpy",
    "math": "math",
    "random": "random",
    "itertools": "itertools",
    "functools": "functools",
    "gc": "gc",
    "plt": "matplotlib.pyplot",
    "wandb": "wandb",
    "pl": "lightning.pytorch",
    "L": "lightning",
    "dist": "torch.distributed",
    "deepspeed": "deepspeed",
    "partial": "functools.partial",
    "DataLoader": "torch.utils.data.DataLoader",
    "Dataset": "torch.utils.data.Dataset",
    "checkpoint": "torch.utils.checkpoint.checkpoint",
    "Accelerator": "accelerate.Accelerator",
    "GradScaler": "torch.amp.GradScaler",
    "autocast": "torch.amp.autocast",
    "FSDP": "torch.distributed.fsdp.FullyShardedDataParallel",
    "DDP": "torch.nn.parallel.DistributedDataParallel",
    "DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "deque": "collections.deque",
    "defaultdict": "collections.defaultdict",
    "OrderedDict": "collections.OrderedDict",
    "lru_cache": "functools.lru_cache",
    "tqdm": "tqdm.tqdm",
}

#: Names under which torch exports the same object twice; the left one is used throughout.
ALIASES = {
    "torch.autograd.no_grad": "torch.no_grad",
    "torch.autograd.grad_mode.no_grad": "torch.no_grad",
    "torch.autograd.enable_grad": "torch.enable_grad",
    "torch.autograd.grad_mode.enable_grad": "torch.enable_grad",
    "torch.autograd.set_grad_enabled": "torch.set_grad_enabled",
    "torch.autograd.grad_mode.set_grad_enabled": "torch.set_grad_enabled",
    "torch.autograd.inference_mode": "torch.inference_mode",
    "torch.autograd.grad_mode.inference_mode": "torch.inference_mode",
    "torch.utils.checkpoint": "torch.utils.checkpoint",
    "torch.cuda.amp.GradScaler": "torch.amp.GradScaler",
    "torch.cuda.amp.grad_scaler.GradScaler": "torch.amp.GradScaler",
    "torch.amp.grad_scaler.GradScaler": "torch.amp.GradScaler",
    "torch.cuda.amp.autocast": "torch.amp.autocast",
    "torch.autocast": "torch.amp.autocast",
    "torch.cuda.memory.empty_cache": "torch.cuda.empty_cache",
    "accelerate.accelerator.Accelerator": "accelerate.Accelerator",
    "torch.utils.data.dataloader.DataLoader": "torch.utils.data.DataLoader",
}


def dotted(node: cst.BaseExpression | None) -> str:
    """`a.b.c` for a chain of names, otherwise the empty string."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if isinstance(node, cst.Name):
        parts.append(node.value)
        return ".".join(reversed(parts))
    return ""


def canonical(qualified: str) -> str:
    """The one name used for things that torch exports under several."""
    return ALIASES.get(qualified, qualified)


def bindings(node: cst.Import | cst.ImportFrom) -> Iterator[tuple[str, str]]:
    """The (local name, qualified name) pairs that an import statement binds.

    Relative imports keep their leading dots: the file alone does not tell where they point.
    """
    if isinstance(node, cst.Import):
        for alias in node.names:
            full = dotted(alias.name)
            if alias.asname is not None and isinstance(alias.asname.name, cst.Name):
                yield alias.asname.name.value, full
            else:
                top = full.split(".")[0]
                yield top, top
        return
    if isinstance(node.names, cst.ImportStar):
        return
    module = module_of(node)
    for alias in node.names:
        name = dotted(alias.name)
        local = alias.asname.name.value if alias.asname and isinstance(alias.asname.name, cst.Name) else name
        joint = "" if module.endswith(".") or not module else "."
        yield local, f"{module}{joint}{name}"


def module_of(node: cst.ImportFrom) -> str:
    """The module that names are imported from, with the leading dots of a relative import."""
    return "." * len(node.relative) + (dotted(node.module) if node.module is not None else "")
