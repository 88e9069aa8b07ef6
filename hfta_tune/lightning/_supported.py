"""What of a LightningModule is supported: the rest is named before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import getattr_static
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hfta_tune.fusion import FusionError

__all__ = ["Optimization", "base_of", "check_built", "check_class", "optimization_of", "precision_of"]

_FREE = {
    "forward", "training_step", "validation_step", "configure_optimizers", "configure_model", "prepare_data", "setup",
    "train_dataloader", "val_dataloader", "on_train_epoch_end", "on_validation_epoch_end", "example_input_array",
    # Of testing and predicting, which is not done here.
    "test_step", "predict_step", "test_dataloader", "predict_dataloader", "teardown",
    *(f"on_{stage}_{part}" for stage in ("test", "predict") for part in ("start", "end", "epoch_start", "epoch_end")),
    *(f"on_{stage}_batch_{part}" for stage in ("test", "predict") for part in ("start", "end")),
    "on_test_model_eval", "on_test_model_train", "on_predict_model_eval",
}  # fmt: skip
_PRECISIONS = {"32": "32", "32-true": "32", "bf16": "bf16", "bf16-mixed": "bf16"}
_REMEDIES = {
    "optimizer_step": "hfta_tune steps the optimizers of all lanes at once",
    "configure_gradient_clipping": "pass gradient_clip_val and gradient_clip_algorithm to trainable()",
    "backward": "hfta_tune differentiates the losses of all lanes at once",
}


class Optimization:
    """What configure_optimizers returned.

    Attributes:
        optimizer: The optimizer.
        scheduler: The learning-rate scheduler, or None.
        interval: When it advances, "epoch" or "step".
        monitor: What ReduceLROnPlateau watches.
    """

    def __init__(
        self, optimizer: Optimizer, scheduler: Any = None, interval: str = "epoch", monitor: str | None = None
    ) -> None:
        self.optimizer, self.scheduler, self.interval, self.monitor = optimizer, scheduler, interval, monitor


def base_of(kind: Any) -> type:
    """Lightning's own class that a module's class is made of, of either package.

    Raises:
        TypeError: if there is none.
    """
    for base in kind.__mro__ if isinstance(kind, type) else ():
        if base.__name__ == "LightningModule" and base.__module__.split(".")[0] in ("lightning", "pytorch_lightning"):
            return base
    raise TypeError(f"trainable takes a LightningModule class but got {kind!r:.80}. Pass the class, not an instance.")


def check_class(kind: type) -> None:
    """Check that a module's class does nothing that could not be done for many trials at once.

    Raises:
        TypeError: with all that it does.
    """
    base = base_of(kind)
    hooks = {name for name in dir(base) if not name.startswith("_")} - set(dir(nn.Module)) - _FREE
    found = sorted(name for name in hooks if getattr_static(kind, name, None) is not getattr_static(base, name, None))
    if found:
        reasons = [f"{name} ({_REMEDIES[name]})" if name in _REMEDIES else name for name in found]
        raise TypeError(
            f"{kind.__name__} overrides {', '.join(reasons)}, which hfta_tune does not call. Do without, or train "
            "it as a function of your own with hfta_tune.prepare."
        )
    for hook in ("training_step", "configure_optimizers"):
        if getattr(kind, hook) is getattr(base, hook):
            raise TypeError(f"{kind.__name__} lacks {hook}; define it.")


def check_built(module: Any) -> None:
    """Check a module that was built.

    Raises:
        FusionError: with what it does that could not be done for many trials at once.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise FusionError(
            f"{name} optimizes by itself (automatic_optimization is False); train it as a function of your own with "
            "hfta_tune.prepare."
        )
    for path, part in module.named_modules():
        if any(base.__module__.startswith("torchmetrics.") for base in type(part).__mro__):
            raise FusionError(
                f"{name} has the metric object {path!r}, whose state would be that of all lanes; log what a function "
                "of torchmetrics.functional returns."
            )


def optimization_of(name: str, given: Any) -> Optimization:
    """Read what configure_optimizers returned, in any form that Lightning takes for one optimizer.

    Raises:
        FusionError: if it is something else.
    """
    schedulers: Any = []
    if isinstance(given, Mapping):
        given, schedulers = given.get("optimizer"), [given["lr_scheduler"]] if "lr_scheduler" in given else []
    elif isinstance(given, (list, tuple)) and len(given) == 2 and not isinstance(given[0], (Optimizer, Mapping)):
        given, schedulers = given
    if isinstance(given, (list, tuple)) and len(given) == 1:
        return optimization_of(name, given[0]) if not schedulers else _with_schedule(name, given[0], schedulers)
    return _with_schedule(name, given, schedulers)


def _with_schedule(name: str, optimizer: Any, schedulers: Any) -> Optimization:
    if not isinstance(optimizer, Optimizer):
        raise FusionError(
            f"configure_optimizers of {name} returned {optimizer!r:.80}; return one optimizer, and for several write a "
            "FusedTrainable, whose build_optimizer may return a dict."
        )
    schedulers = list(schedulers) if isinstance(schedulers, (list, tuple)) else [schedulers]
    if len(schedulers) > 1:
        raise FusionError(f"configure_optimizers of {name} returned {len(schedulers)} schedulers; chain them into one.")
    if not schedulers:
        return Optimization(optimizer)
    entry = schedulers[0] if isinstance(schedulers[0], Mapping) else {"scheduler": schedulers[0]}
    if entry.get("frequency", 1) != 1:
        raise FusionError(f"the schedule of {name} has frequency={entry['frequency']!r}; only 1 is supported.")
    scheduler, interval, monitor = entry["scheduler"], entry.get("interval", "epoch"), entry.get("monitor")
    if isinstance(scheduler, ReduceLROnPlateau) and monitor is None:
        raise FusionError(f'ReduceLROnPlateau of {name} has no "monitor"; name the metric that it watches.')
    return Optimization(optimizer, scheduler, interval, monitor if isinstance(scheduler, ReduceLROnPlateau) else None)


def precision_of(given: Any) -> str:
    """The precision by Lightning's names.

    Raises:
        ValueError: if hfta_tune does not have it.
    """
    if str(given) not in _PRECISIONS:
        raise ValueError(f"precision is {given!r}; set it to one of {', '.join(map(repr, _PRECISIONS))}.")
    return _PRECISIONS[str(given)]
