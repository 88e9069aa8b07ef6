"""What one lane trains: the models, optimizers and criteria that its code has prepared."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from greenlet import getcurrent
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from hfta_tune.fusion import FusionError, Lane, Options, form_of_optimizer, obstacle_of_optimizers, optimizer_split
from hfta_tune.fusion.calls import Call, CalledArray
from hfta_tune.fusion.comparison import comparable, first_incomparable
from hfta_tune.fusion.gradient_rows import Graph
from hfta_tune.fusion.optimizers import OptimizerViews
from hfta_tune.fusion.signature import model_signature
from hfta_tune.loops._classes import as_bare, make_bare
from hfta_tune.loops._hub import LoopLane, Request
from hfta_tune.loops._watched import Watched, obstacle_of_hooks

if TYPE_CHECKING:
    from hfta_tune.loops._criteria import Criterion
    from hfta_tune.loops._fusion import Fusion

__all__ = ["ON_ITS_OWN", "LoopTrial", "form_of_call"]

_MODEL, _FUNCTION, _BACKWARD, _CLIP, _STEP = range(5)
"""The stages of a training step: lanes that are behind are served first."""

ON_ITS_OWN: Any = object()
"""The answer to a lane that is to do what it asked for by itself."""

_MOST_CHANGES = 8
_data_ptr = Tensor.data_ptr
_OPTIONS = {False: Options("32"), True: Options("bf16")}


class LoopTrial:
    """A lane's prepared objects, and the array in which they are trained.

    Attributes:
        loop: The lane's loop.
        name: For messages.
        lane: The lane as arrays know it: all models of the trial as one, and the optimizers by number.
        key: Of the signature; trials with equal keys may share an array.
        obstacle: Why the trial cannot be fused, or None.
        array: The array, once it has one.
        alone: Whether the lane calls its own models by itself.
        place: In which array it was when its function ended, and its signature.
    """

    def __init__(self, loop: LoopLane, fusion: Fusion) -> None:
        self.loop = loop
        self.name = f"trial {loop.name}"
        self.obstacle: str | None = None
        self.array: CalledArray | None = None
        self.alone = False
        self._graphs: list[weakref.ref[Graph]] = []
        self.key = -1
        self.place: dict[str, Any] | None = None
        self.settled_until = 0
        self.splits = 0
        self.lane: Lane = Lane(self.name, nn.ModuleDict(), {})
        self.device = torch.device("cpu")
        self._device_type = "cpu"
        self._fusion = fusion
        self._models: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._positions: dict[int, str] = {}
        self._on_views: set[str] = set()
        self._slots: dict[int, str] = {}
        self._modules: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []
        self._names: dict[int, str] = {}
        self._trained_by: dict[str, tuple[int, list[nn.Parameter], frozenset[str]]] = {}
        self._trainable: list[bool] = []
        self._watched: Watched | None = None
        self._changes = 0
        self._restless: str | None = None
        self._tensors: list[Tensor] = []
        self._stack: Any = None
        self._places: list[int] | None = None

    # What belongs to it

    def add(self, models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
        """Take in further models and optimizers; what nobody holds any more goes."""
        self._forget_the_dead()
        known = set(map(id, self._models))
        self._models += [model for model in models if id(model) not in known]
        for optimizer in optimizers:
            if not self.has(optimizer):
                self._optimizers.append(optimizer)
                self._patch(optimizer)
        self.sign()

    def _forget_the_dead(self) -> None:
        """Let go of models that only this object holds, and of the optimizers that trained nothing else."""
        if not self._models:
            return
        self._fusion.take_out(self)
        held = [weakref.ref(model) for model in self._models]
        self._models, self._modules, self._watched, self.lane.model = [], [], None, nn.ModuleDict()
        self._models = [model for own in held if (model := own()) is not None]
        if len(self._models) == len(held):
            return
        left = {id(parameter) for model in self._models for parameter in model.parameters()}
        for optimizer in list(self._optimizers):
            trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if trained <= set(self._names) and not trained & left:
                self._optimizers.remove(optimizer)
                _unpatch(optimizer)

    def has(self, optimizer: Optimizer) -> bool:
        """Whether it has prepared this optimizer."""
        return any(optimizer is own for own in self._optimizers)

    @property
    def can_be_judged(self) -> bool:
        """Whether it has models and optimizers, so that what stands in the way is no matter of order."""
        return bool(self._models and self._optimizers)

    def sign(self) -> None:
        """Read the signature of what is trained; the lane leaves its array."""
        self._fusion.take_out(self)
        models = self._models
        container = nn.ModuleDict({str(number): model for number, model in enumerate(models)})
        self._slots = {id(model): str(number) for number, model in enumerate(models)}
        optimizers = {str(number): optimizer for number, optimizer in enumerate(self._optimizers)}
        self._positions = {id(optimizer): position for position, optimizer in optimizers.items()}
        self.lane.model, self.lane.optimizers = container, optimizers
        with as_bare(models):
            signature = model_signature(container)
        self.obstacle = (
            self._restless or signature.obstacle or obstacle_of_hooks(container) or obstacle_of_optimizers(optimizers)
        )
        self._names = {id(parameter): name for name, parameter in container.named_parameters()}
        split: Any = ()
        try:
            split = tuple(optimizer_split(container, optimizer) for optimizer in self._optimizers)
        except KeyError:
            self.obstacle = self.obstacle or (
                "an optimizer trains parameters of no prepared model; pass all its models to prepare() as well"
            )
        devices = {tensor.device for tensor in (*container.parameters(), *container.buffers())}
        if len(devices) > 1:
            self.obstacle = self.obstacle or f"its models are on several devices ({', '.join(map(str, devices))})"
        self.device = next(iter(devices), torch.device("cpu"))
        self._device_type = self.device.type
        forms: tuple[Any, ...] = tuple(form_of_optimizer(optimizer) for optimizer in self._optimizers)
        self._on_views = {str(number) for number, form in enumerate(forms) if OptimizerViews in form}
        self._modules = list(container.modules())
        self._parameters = list(container.parameters())
        self._tensors = [*self._parameters, *container.buffers()]
        self._trainable = [parameter.requires_grad for parameter in self._parameters]
        self._watched = Watched(container)
        self._stack, self._places = None, None
        self._trained_by = {}
        self.key = self._fusion.key_of((signature.key, split, forms, self.device))
        if not models:
            self.obstacle = self.obstacle or "it has prepared no model"
        self.alone = self.obstacle is not None or self._fusion.is_hopeless(self.key)

    def leave(self) -> None:
        """The lane's function has ended."""
        if self.array is not None:
            self.place = {"array": self.array.number, "signature": f"{self.key:016x}"}
        self._fusion.take_out(self)
        for optimizer in self._optimizers:
            _unpatch(optimizer)
        for model in self._models:
            make_bare(model)
        self._graphs.clear()

    def own_storage(self) -> None:
        """Give the lane's tensors storage of their own until it is called again."""
        self._fusion.take_out(self)

    def interrupted(self) -> None:
        """What follows is no part of a training step."""
        self._fusion.interrupted()

    def check(self) -> None:
        """An epoch begins: see whether the lane's code has changed its models.

        Raises:
            FusionError: if parameters were replaced.
        """
        self._changes = 0
        if not self.alone:
            self._follow()
            self._see_hooks()
        self._follow_tensors()

    def _follow(self) -> None:
        """Follow what the lane's code has changed of its models.

        Raises:
            FusionError: if parameters were replaced.
        """
        watched = self._watched
        if (watched is None or not watched.have_changed()) and self._trainable == [
            parameter.requires_grad for parameter in self._parameters
        ]:
            return
        present = set(map(id, self.lane.model.parameters()))
        if not all(id(parameter) in present for parameter in self._parameters):
            raise FusionError(
                f"{self.name}: a parameter of a prepared model was replaced. Change models before prepare(), "
                "or make the new model ready with prepare() and an optimizer of its own."
            )
        self._changes += 1
        if self._changes > _MOST_CHANGES:
            attribute = None if watched is None else watched.changed_attribute()
            self._restless = (
                "requires_grad or modules are changed from batch to batch"
                if attribute is None
                else f"the attribute {attribute!r} changes from batch to batch; pass it to the call, as a tensor"
            )
        self._sign_again()

    def _sign_again(self) -> None:
        before = self.obstacle
        self.sign()
        if self.obstacle is not None and before is None:
            self._fusion.warn_once(f"train one by one: {self.obstacle}.", self.name)

    def _see_hooks(self) -> None:
        """See whether the lane's code has hooked the backward pass: at each epoch, and before the first call."""
        hooks = any(module._backward_hooks or module._backward_pre_hooks for module in self._modules) or any(
            parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in self._parameters
        )
        if hooks:
            self._sign_again()

    def _follow_tensors(self) -> None:
        """See whether the lane's code has put others in the place of its tensors: `p.data = ...`."""
        if self.array is None:
            return
        if self.array.present is not self._stack:
            self._stack, self._places = self.array.present, self.array.places(self.lane)
        if self._places is not None:
            places = list(map(_data_ptr, self._tensors))
            if places[: len(self._places)] != self._places:
                self.sign()

    def live_graphs(self) -> list[Graph]:
        """What a backward pass of this lane may reach."""
        live = [graph for own in self._graphs if (graph := own()) is not None]
        if len(live) < len(self._graphs):
            self._graphs = [own for own in self._graphs if own() is not None]
        return live

    def has_called(self, graph: weakref.ref[Graph]) -> None:
        """Note what a backward pass of this lane may reach."""
        if graph not in self._graphs:
            self._graphs.append(graph)

    # What its code asks for

    def call(self, model: nn.Module, bare: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A prepared model is called."""
        if self.alone:
            return bare(*args, **kwargs)
        slot = self._slots.get(id(model))
        options = self._options()
        if slot is None or options is None:
            return bare(*args, **kwargs)
        self._follow()
        if self.array is None:
            self._see_hooks()
        if self.alone:  # what has changed cannot be fused
            return bare(*args, **kwargs)
        self._follow_tensors()
        modes = tuple([module.training for module in self._modules])
        call, form = form_of_call(args, kwargs)
        grad = torch.is_grad_enabled()
        kind = (slot, form, modes, grad, options)
        answer = self.loop.wait(Request(self._fusion.serve_call, (self.key, *kind), _MODEL, (call, kind)))
        return bare(*args, **kwargs) if answer is ON_ITS_OWN else answer

    def call_function(self, criterion: Criterion, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A prepared criterion is called."""
        options = self._options()
        key = None if self.alone else criterion.key
        if key is None or options is None:
            return function(*args, **kwargs)
        call, form = form_of_call(args, kwargs)
        kind = (key, form, torch.is_grad_enabled(), options)
        request = Request(self._fusion.serve_function, kind, _FUNCTION, (call, function, kind))
        answer = self.loop.wait(request)
        return function(*args, **kwargs) if answer is ON_ITS_OWN else answer

    def backward(self, loss: Tensor, scale: float, retain_graph: bool | None) -> None:
        """A loss is to be differentiated."""
        if self.alone and not self.live_graphs():
            (loss * scale if scale != 1 else loss).backward(retain_graph=retain_graph)
            return
        if not loss.requires_grad or loss.numel() != 1:
            loss.backward()  # torch's own error
        request = Request(self._fusion.serve_backward, bool(retain_graph), _BACKWARD, (loss, scale))
        self.loop.wait(request)

    def clip(self, parameters: Sequence[nn.Parameter], limit: float, how: Any, bare: Callable[[], Any]) -> Any:
        """Gradients are clipped, in place."""
        names = tuple(self._names.get(id(parameter), "") for parameter in parameters if parameter.grad is not None)
        if self.alone or not names or "" in names:
            return bare()
        request = Request(self._fusion.serve_clip, (self.key, how, names), _CLIP, (limit, how, names))
        answer = self.loop.wait(request)
        return bare() if answer is ON_ITS_OWN else answer

    def _patch(self, optimizer: Optimizer) -> None:
        """Let the optimizer's step be carried out for all lanes at once. It stays the user's own object."""
        step, load = optimizer.step, optimizer.load_state_dict
        trial = self

        def fused_step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return trial._step(trial._positions[id(optimizer)], step, closure)

        def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
            if not set_to_none or type(optimizer).zero_grad is not Optimizer.zero_grad:
                type(optimizer).zero_grad(optimizer, set_to_none=set_to_none)
                return
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

        def state_dict(optimizer: Optimizer) -> dict[str, Any]:
            # Of a row of the array, torch.save would write the rows of all lanes.
            state = type(optimizer).state_dict(optimizer)
            own: dict[str, Any] = pytree.tree_map_only(Tensor, torch.clone, state)
            return own

        def load_state_dict(optimizer: Optimizer, state: dict[str, Any]) -> None:
            trial.own_storage()
            load(state)

        for own in (zero_grad, state_dict, load_state_dict):
            setattr(optimizer, own.__name__, types.MethodType(own, optimizer))
        # torch's schedulers look for this, and would wrap the step once more. It notes that it was called itself.
        fused_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = types.MethodType(fused_step, optimizer)  # type: ignore[method-assign]

    def _step(self, position: str, bare: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        if self.loop.greenlet is not getcurrent() or self.obstacle is not None:
            return bare() if closure is None else bare(closure)
        if closure is not None and position in self._on_views:  # it may evaluate the loss as often as it likes
            value = bare(closure)
            self._has_stepped(position)
            return value
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        self._follow_tensors()
        trained, names = self._trained(position)
        for parameter in trained:
            if parameter.grad is None:
                names = frozenset([self._names[id(own)] for own in trained if own.grad is not None])
                break
        request = Request(self._fusion.serve_step, (self.key, position, names), _STEP, (position, bare))
        self.loop.wait(request)
        self._has_stepped(position)
        return value

    def _has_stepped(self, position: str) -> None:
        self.lane.optimizers[position]._opt_called = True  # type: ignore[attr-defined]
        if not self.loop.in_epoch:
            self.loop.next_batch()

    def _trained(self, position: str) -> tuple[list[nn.Parameter], frozenset[str]]:
        """The parameters that an optimizer trains, and their names."""
        known = self._trained_by.get(position)
        if known is None or known[0] != len(self.lane.optimizers[position].param_groups):
            if known is not None:  # a group was added
                self.sign()
            trained = self.lane.trained_by(position)
            names = frozenset(self._names.get(id(parameter), "") for parameter in trained)
            known = len(self.lane.optimizers[position].param_groups), trained, names
            self._trained_by[position] = known
        return known[1], known[2]

    # How it asks

    def _options(self) -> Options | None:
        """How its calls run, or None if arrays cannot run them so."""
        if not torch.is_autocast_enabled(self._device_type):
            return _OPTIONS[False]
        return _OPTIONS[True] if torch.get_autocast_dtype(self._device_type) == torch.bfloat16 else None


def _unpatch(optimizer: Optimizer) -> None:
    for name in ("step", "zero_grad", "state_dict", "load_state_dict"):
        vars(optimizer).pop(name, None)


def form_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Any]:
    """The arguments of a call as leaves, and what calls must have in common to be made as one."""
    if not kwargs:
        for arg in args:
            if not isinstance(arg, Tensor):
                break
        else:
            return Call(list(args), None), tuple([(arg.shape, arg.dtype) for arg in args])
    leaves, structure = pytree.tree_flatten((args, kwargs))
    form = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else _form_of_value(leaf) for leaf in leaves)
    return Call(leaves, structure), (repr(structure), form)


def _form_of_value(value: Any) -> Any:
    key = comparable(value)
    return key if first_incomparable(key) is None else id(value)
