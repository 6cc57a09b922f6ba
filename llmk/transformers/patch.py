"""`patch`: put the operators into a model that exists."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from itertools import product

from torch import nn

from llmk.apart import apart_from_caller
from llmk.registry import check_flag
from llmk.transformers.adapters import linear_of
from llmk.transformers.calls import CallFinder
from llmk.transformers.classes import (
    BehindHook,
    Change,
    changes_of,
    class_with,
    is_behind_hook,
    set_classes,
)
from llmk.transformers.convolutions import CausalConv1d, CausalConv1dStep
from llmk.transformers.exact_types import ExactTypes
from llmk.transformers.expert_adapters import AdaptedExperts, find_adapted_experts, is_wrapper
from llmk.transformers.experts import GATE
from llmk.transformers.gates import GateFinder
from llmk.transformers.loss import Head, LossSite, find_loss
from llmk.transformers.masks import find_masks
from llmk.transformers.mixtures import find_experts
from llmk.transformers.norms import find_gated_norm, find_norm
from llmk.transformers.packed_rows import find_packed_rows
from llmk.transformers.probe import Differs, Once
from llmk.transformers.projections import Projections, find_projections
from llmk.transformers.recurrences import DeltaRule, DeltaRuleStep, Scan, WholeLayer
from llmk.transformers.report import REPORT, Entry, Report
from llmk.transformers.residuals import Residual
from llmk.transformers.rewrite import CannotRewrite, Edit, Rewrite, Source, source_of
from llmk.transformers.rotary import RopeFinder
from llmk.transformers.streams import find_streams

Finder = Callable[[nn.Module, Source], Edit | None]
KINDS = {
    "norms": "norm",
    "mlps": "mlp",
    "experts": "experts",
    "rope": "rope",
    "residuals": "residual",
    "projections": "projection",
    "streams": "streams",
    "convolutions": "convolution",
    "recurrences": "recurrence",
    "loss": "loss",
    "masks": "mask",
}
"""The kinds of replacements, by the option of `patch` for each."""
CONVOLUTIONS = CausalConv1d(), CausalConv1dStep()
RECURRENCES = (
    *(
        rule(grouped, channels)
        for rule, channels, grouped in product((DeltaRule, DeltaRuleStep), (False, True), (True, False))
    ),
    Scan(),
    WholeLayer(),
)
"""The forms that a function is tried for, in this order."""
REPLACED = "its forward was replaced already: patch() the model before whatever did that"


def patch(
    model: nn.Module,
    *,
    norms: bool = True,
    mlps: bool = True,
    experts: bool = True,
    rope: bool = True,
    residuals: bool = True,
    projections: bool = True,
    streams: bool = True,
    convolutions: bool = True,
    recurrences: bool = True,
    loss: bool = True,
    masks: bool = True,
    skip_ignored: bool = True,
) -> Report:
    """Replace what llmk's operators compute in a Hugging Face model, or in any model of modules like those.

    What a module computes is found by running it on random input, in float32 on the CPU, so that no class needs to be
    known: a candidate that does not agree, outputs and gradients, is left as it is and named in the report. Only this
    instance changes. Its parameters, state dict and `save_pretrained` stay as they are.

    In training with labels, `output.loss` comes from `fused_linear_ce` and `output.logits` is None; in evaluation and
    generation the logits are there. A LoRA of PEFT's on the output projection is part of that product; one on packed
    experts is two grouped products beside each of theirs.

    What is patched already stays as it is: the model, or a part of it.

    Args:
        model: The model. Patch it before FSDP wraps it; DDP and PEFT may come before or after. Its parameters may be
            on any device, "meta" too.
        norms: RMSNorm, with `weight`, `1 + weight` or none, or with a gate, and LayerNorm.
        mlps: SwiGLU and GeGLU layers, gate and up projected apart or packed, and the gates of packed experts.
        experts: The experts of mixtures in packed weights, whole.
        rope: The rotary embedding of queries and keys.
        residuals: A residual sum and the RMSNorm that follows it, in one.
        projections: The linear layers that read an RMSNorm, where norms are replaced too: in training, not compiled,
            they keep the norm's input.
        streams: Hyper-connections: the product with the normalized residual streams, where norms are replaced too,
            Sinkhorn's projection, what a layer reads of the streams, and what they become.
        convolutions: The short causal convolution before a recurrence, and its update by one token.
        recurrences: The gated delta rule, also Kimi Linear's, over chunks of tokens and by one token, and the scan of
            Mamba-2 over chunks.
        loss: The output projection and the causal language model's loss, in one.
        masks: With `scaled_dot_product_attention`, no causal mask where neither padding nor packing needs one, also
            when a compiler traces the model.
        skip_ignored: The loss does no work for labels that are ignored, see `fused_linear_ce`: worth its time where
            more than about a tenth of them are.

    Returns:
        The report: `print(report)` shows what was replaced and what was left and why, `report.unpatch()` undoes it.

    Raises:
        TypeError: `model` is not a `torch.nn.Module`, or an option is neither True nor False.
    """
    options = {name: value for name, value in locals().items() if name != "model"}
    if isinstance(model, type):
        raise TypeError(f"model: expected a torch.nn.Module, got the class {model.__name__}; patch an instance of it")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    for name, value in options.items():
        check_flag(name, value)
    patched, reports = patched_modules(model), reports_in(model)
    if patched and all(module in patched for module in causal_models(model)):
        return next(iter(reports.values())) if len(reports) == 1 else Report(model, entries_of(reports))
    kinds = {kind for option, kind in KINDS.items() if options[option]}
    plan = apart_from_caller(Plan, model, kinds, skip_ignored, patched)
    classes = plan.classes()
    report = Report(model, [*plan.entries, *entries_of(reports)])
    set_classes(classes)
    if classes:
        vars(model)[REPORT] = report
    return report


def patched_modules(model: nn.Module) -> set[nn.Module]:
    """The modules that were patched, and all that are inside a model that was."""
    inside = {part for module in model.modules() if REPORT in vars(module) for part in module.modules()}
    return inside | {module for module in model.modules() if changes_of(module)}


def causal_models(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost models with an output projection: what PEFT, DDP and their like wrap has one, not the wrapper."""
    if hasattr(type(module), "get_output_embeddings"):
        yield module
    else:
        for child in module.children():
            yield from causal_models(child)


def reports_in(model: nn.Module) -> dict[str, Report]:
    """The reports of the models in it that are patched, by their names; with its own there are no others."""
    reports = {name: vars(module)[REPORT] for name, module in model.named_modules() if REPORT in vars(module)}
    return {"": reports[""]} if "" in reports else reports


def entries_of(reports: Mapping[str, Report]) -> list[Entry]:
    """Their entries, with the names that modules have in the model around."""
    return [e._replace(name=f"{name}.{e.name}".strip(".")) for name, report in reports.items() for e in report.entries]


class Plan:
    """The changes to each module, found without touching any."""

    def __init__(self, model: nn.Module, kinds: set[str], skip_ignored: bool, patched: set[nn.Module]) -> None:
        self.entries: list[Entry] = []
        self.modules = {name: module for name, module in model.named_modules() if module not in patched}
        self.changes: dict[nn.Module, list[Change]] = {}
        self.exact = ExactTypes(self.modules.values())
        self.whole: set[nn.Module] = set()  # whose forward is given already
        if "norm" in kinds:
            self._find_whole("norm", lambda module: find_gated_norm(module) or find_norm(module))
        if "experts" in kinds:
            self._find_whole("experts", find_experts)
            self._find_whole("experts", self._adapted_experts)
        finders: dict[str, Finder] = {
            "mlp": GateFinder(),
            "rope": RopeFinder(),
            "residual": self._residual,
            "streams": find_streams,
            "convolution": CallFinder("convolution", *CONVOLUTIONS),
            "recurrence": CallFinder("recurrence", *RECURRENCES),
            "mask": find_masks,
            "projection": self._projections,
        }
        finders = {kind: find for kind, find in finders.items() if kind in kinds}
        causal = set(causal_models(model))
        for name, module in self.modules.items():
            if module not in self.whole:
                find = functools.partial(self._find_loss, skip_ignored)
                more = {"loss": find} if "loss" in kinds and module in causal else {}
                self._find_edits(name, module, "forward", finders | more)
            if "mlp" in finders and module not in self.whole and hasattr(type(module), GATE):
                self._find_edits(name, module, GATE, {"experts": finders["mlp"]})
        self._find_packed_rows(causal)

    def _why_not(self, module: nn.Module, method: str) -> str | None:
        """The reason for which a module cannot be given another class."""
        if method in vars(module) and not is_behind_hook(module):
            return REPLACED
        return self.exact.why_not(module)

    def _change_whole(self, module: nn.Module, change: Change) -> None:
        self.whole.add(module)
        self.changes[module] = [change]

    def _leave(self, name: str, kind: str, module: nn.Module, why: object) -> None:
        self.entries.append(Entry(name, kind, type(module).__name__, False, str(why)))

    def _adapted_experts(self, module: nn.Module) -> AdaptedExperts | None:
        inner = {wrapper.base_layer for wrapper in self.modules.values() if is_wrapper(wrapper)}
        return None if module in inner else find_adapted_experts(module)

    def _find_whole(self, kind: str, find: Callable[[nn.Module], Change | None]) -> None:
        """Modules whose forward is an operator's. Those that are alike are tried once."""
        tried = Once(find)
        for name, module in self.modules.items():
            try:
                found = tried(module)
                if found is not None and (why := self._why_not(module, "forward")):
                    raise Differs(why)
            except Differs as why_not:
                self._leave(name, kind, module, why_not)
                continue
            if found is not None:
                self.entries.append(Entry(name, kind, type(module).__name__, True, found.what))
                self._change_whole(module, found)

    def _residual(self, module: nn.Module, source: Source) -> Residual | None:
        adding = [n for n, child in module.named_children() if any(c.adds for c in self.changes.get(child, ()))]
        edit = Residual(frozenset(adding))
        return edit if adding and edit.apply(copy.deepcopy(source.definition)) else None

    def _projections(self, module: nn.Module, source: Source) -> Projections | None:
        normed = any(change.adds for changes in self.changes.values() for change in changes)
        return find_projections(module, source) if normed else None

    def _find_loss(self, skip_ignored: bool, model: nn.Module, source: Source) -> LossSite:
        found = find_loss(model, source, skip_ignored)
        for path in (found.path, *(inner for inner, _ in found.inner)):
            if why := self.exact.why_not(linear_of(model.get_submodule(path))):
                raise Differs(f"{path}: {why}")
        return found

    def _find_edits(self, name: str, module: nn.Module, method: str, finders: Mapping[str, Finder]) -> None:
        """Give the module its own method, with the edits that its source has a place for."""
        edits: dict[str, Edit] = {}
        try:
            source = source_of(getattr(type(module), method))
            for kind, find in finders.items():
                try:
                    edit = find(module, source)
                except Differs as why:
                    self._leave(name, kind, module, why)
                else:
                    edits |= {} if edit is None else {kind: edit}
            if edits and (why := self._why_not(module, method)):
                raise CannotRewrite(why)
            change = Rewrite(tuple(edits.values()), method)
            if edits:
                change.methods(type(module))
        except CannotRewrite as why:
            self._leave(name, method, module, why)
            return
        if edits:
            self.changes.setdefault(module, []).append(change)
        for kind, edit in edits.items():
            self.entries.append(Entry(name, kind, type(module).__name__, True, edit.what))
            if isinstance(edit, LossSite):
                self.changes.setdefault(linear_of(module.get_submodule(edit.path)), []).append(Head())
                for inner, change in edit.inner:
                    self._change_whole(module.get_submodule(inner), Rewrite((change,)))

    def _find_packed_rows(self, causal: set[nn.Module]) -> None:
        """Tell the layers of hybrids where the sequences of a row begin."""
        replaced: dict[str, set[str]] = {}
        for entry in self.entries:
            if entry.replaced and entry.kind in ("convolution", "recurrence"):
                replaced.setdefault(entry.name, set()).add(entry.kind)
        for name, edit in find_packed_rows(self.modules, replaced, causal):
            module = self.modules[name]
            changes = self.changes.get(module, [])
            before = next((c for c in changes if isinstance(c, Rewrite) and c.method == "forward"), Rewrite(()))
            change = Rewrite((*before.edits, edit))
            try:
                if why := self._why_not(module, "forward"):
                    raise CannotRewrite(why)
                change.methods(type(module))
            except CannotRewrite as why:
                self._leave(name, edit.kind, module, why)
                continue
            self.changes[module] = [*(c for c in changes if c is not before), change]
            self.entries.append(Entry(name, edit.kind, type(module).__name__, edit.why_not is None, edit.what))

    def classes(self) -> list[tuple[nn.Module, type]]:
        """The modules that change, and what they become."""
        for module, changes in self.changes.items():
            if is_behind_hook(module):
                changes.append(BehindHook())
        return [(module, class_with(module, tuple(changes))) for module, changes in self.changes.items()]
