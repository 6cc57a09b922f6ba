"""The trainers that compute their loss through TRL's fused head, read from the code of `compute_loss`."""

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

ARGUMENT = "fused_lm_head"
"""The keyword with which TRL's trainers ask a model for the fused head."""

INSTEAD = {
    "A2POTrainer": "llmk.functional.linear_logprobs",
    "AsyncDistillationTrainer": "llmk.losses.distill_topk",
    "CPOTrainer": "llmk.losses.cpo",
    "DistillationTrainer": "llmk.losses.distill",
    "GKDTrainer": "llmk.losses.distill",
    "GOLDTrainer": "llmk.losses.distill",
    "IWOPDTrainer": "llmk.losses.reinforce or llmk.losses.distill",
    "OnlineDPOTrainer": "llmk.losses.dpo",
    "ORPOTrainer": "llmk.losses.orpo",
    "SDFTTrainer": "llmk.losses.distill_topk or llmk.losses.distill",
    "SDPOTrainer": "llmk.losses.reinforce, llmk.losses.grpo or llmk.losses.distill",
    "ServerDistillationTrainer": "llmk.losses.distill_topk",
    "TPOTrainer": "llmk.losses.cpo and llmk.losses.sft",
}
"""The functions that compute, from hidden states, the losses of trainers that compute them from whole logits."""

WITHOUT_VOCABULARY = ("RewardTrainer",)
"""Trainers of models whose head is a score."""


def asks_for_fused_head(trainer: type) -> bool:
    """Return True if `compute_loss`, or a method of the class that it calls, asks the model for the fused head."""
    seen, ahead = {"compute_loss"}, ["compute_loss"]
    while ahead:
        for code in _codes(trainer, ahead.pop()):
            if ARGUMENT in _strings(code.co_consts):
                return True
            called = [name for name in code.co_names if name not in seen]
            seen.update(called)
            ahead += called
    return False


def calls(trainer: type, method: str, name: str) -> bool:
    """Return True if a method of the class names another one, as it does to call it."""
    return any(name in code.co_names for code in _codes(trainer, method))


def why_not(trainer: type) -> str:
    """Advice where the loss does not go through the fused head."""
    names = [base.__name__ for base in trainer.__mro__]
    if any(name in WITHOUT_VOCABULARY for name in names):
        return (
            f"{trainer.__name__} trains a head of scores, and there is no projection to a vocabulary to replace; "
            "llmk.transformers.PatchCallback replaces the layers of its model"
        )
    instead = next((INSTEAD[name] for name in names if name in INSTEAD), "a function of llmk.losses")
    return (
        f"compute_loss of {trainer.__name__} does not call the fused head, which is what is patched; override it "
        f"with {instead}, from hidden states and the projection"
    )


def _codes(trainer: type, method: str) -> Iterator[CodeType]:
    """The method that the class has, those that `super()` leads it to, and the functions inside them."""
    for base in trainer.__mro__:
        found = vars(base).get(method)
        function = inspect.unwrap(getattr(found, "__func__", found)) if callable(found) else None
        if isinstance(function, FunctionType):
            codes = list(_nested(function.__code__))
            yield from codes
            if not any("super" in code.co_names for code in codes):
                return


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _strings(constants: tuple[object, ...]) -> Iterator[str]:
    """The strings among constants: names of keyword arguments are in a tuple."""
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from _strings(constant)
