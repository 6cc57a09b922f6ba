"""Train a Llama-style language model with llmk, then the same model in plain PyTorch, and compare the two.

    python examples/train.py                     # tiny on a CPU, about two minutes; 1b on a GPU
    python examples/train.py --preset tiny-hybrid     # three layers of four are linear recurrences: hybrid.py
    python examples/train.py --text my_folder    # your own text instead of Python's standard library
    python examples/train.py --resume --steps 500
    python examples/train.py --backend llmk      # a third run: plain, with torch.compile(backend="llmk")

All runs compile the model whole (`torch.compile(fullgraph=True)`), start from the same weights and see the same
batches, each in a fresh process. The output folder then holds run.json, loss.png and a checkpoint of each run.

Losses repeat to the last bit only with one thread (OMP_NUM_THREADS=1): compiled, all runs add up the gradient of the
embedding with atomic additions, in any order.
"""

import argparse
import contextlib
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import hybrid
import llama
import torch
from arguments import InputError, Parser, fail, positive
from hybrid import HybridConfig
from llama import Llama, LlamaConfig
from meter import Meter
from report import ON_A_CPU, Result, compare, compiling, plot_losses, progress_bar, save_json, summary
from text import MIN_VOCAB_SIZE, Batches, TextError, count_tokens, read_text, tokenize

RUNS = {"llmk": ("llmk", "inductor"), "backend": ("plain", "llmk"), "plain": ("plain", "inductor")}
"""The kind of a run's model and the backend that `torch.compile` is asked for, by the run's name."""

BLOCKS = {LlamaConfig: llama.BLOCKS, HybridConfig: hybrid.BLOCKS}
"""The parts that a preset's model can be made of, by its kind."""

WARMUP_STEPS = 2  # the first compiles; both are left out of the speed and the memory
LR_WARMUP_STEPS = 20
CHECKPOINT_SECONDS = 300.0


@dataclass(frozen=True)
class Preset:
    """A model's size, and the training settings that suit it."""

    model: LlamaConfig
    dtype: torch.dtype
    batch_size: int
    seq_len: int
    steps: int
    lr: float


PRESETS = {
    # vocabulary, hidden, intermediate, layers, heads, key-value heads
    "nano": Preset(LlamaConfig(512, 32, 96, 1, 2, 1), torch.float32, 2, 32, 20, 3e-3),
    "tiny": Preset(LlamaConfig(2048, 128, 384, 2, 4, 2), torch.float32, 8, 128, 120, 2e-3),
    "tiny-hybrid": Preset(HybridConfig(2048, 128, 384, 4, 4, 2), torch.float32, 16, 64, 60, 2e-3),
    "small": Preset(LlamaConfig(16384, 768, 2048, 12, 12, 4, tied_head=False), torch.bfloat16, 16, 1024, 200, 6e-4),
    "1b": Preset(LlamaConfig(32768, 2048, 8192, 16, 32, 8, rope_base=5e5), torch.bfloat16, 8, 2048, 100, 3e-4),
}


@dataclass(frozen=True)
class Settings:
    """The settings that decide a run's losses. A checkpoint is continued only with the same ones."""

    preset: str
    vocab_size: int
    batch_size: int
    seq_len: int
    lr: float
    seed: int
    text: str  # names the cached tokens, and with them the text


@dataclass(frozen=True)
class Job:
    """One run: training until `steps` steps are done."""

    run: str
    settings: Settings
    steps: int
    device: torch.device
    tokens: Path
    checkpoint: Path


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    try:
        settings, tokens = prepare(args)
        jobs = [
            Job(run, settings, args.steps, args.device, tokens, args.out / f"{run}.pt")
            for run in RUNS
            if run == "llmk" or (args.baseline if run == "plain" else args.backend == "llmk")
        ]
        prepare_checkpoints(args, jobs)
    except (InputError, TextError) as error:
        fail(str(error), 2)
    try:
        results = [in_a_fresh_process(train, job) for job in jobs]
    except torch.OutOfMemoryError:
        fail(f"out of memory on {args.device}: try a smaller --batch-size, --seq-len or --preset", 1)
    except BrokenProcessPool:
        fail("the system ended the training process, which most often means that memory ran out", 1)
    except KeyboardInterrupt:
        fail("interrupted; --resume continues from the last checkpoint, if one was written", 130)
    finish(args, settings, results)


def finish(args: argparse.Namespace, settings: Settings, results: list[Result]) -> None:
    dtype = PRESETS[settings.preset].dtype
    print(compare(results, dtype))
    if args.device.type == "cpu":
        print(ON_A_CPU)
    plot_losses(args.out / "loss.png", f"preset {settings.preset}, on {args.device}", results)
    config = asdict(PRESETS[settings.preset].model) | asdict(settings)
    config |= {"steps": args.steps, "device": str(args.device), "dtype": str(dtype).removeprefix("torch.")}
    save_json(args.out / "run.json", config, args.device, results, dtype)
    print(f"\nwritten: {args.out / 'run.json'}, {args.out / 'loss.png'}")


# ---- what the user asked for


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, help="the model's size; default: tiny on a CPU, 1b on a GPU")
    parser.add_argument("--text", type=Path, help="a file or a folder; default: the Python standard library's sources")
    parser.add_argument("--steps", type=positive(int), help="how many steps to train in all; default: the preset's")
    parser.add_argument("--batch-size", type=positive(int), help="sequences in a batch; default: the preset's")
    parser.add_argument("--seq-len", type=positive(int), help="tokens in a sequence; default: the preset's")
    parser.add_argument("--vocab-size", type=positive(int), help="tokens of the tokenizer; default: the preset's")
    parser.add_argument("--lr", type=positive(float), help="learning rate; default: the preset's")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches; default: 0")
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: cuda if there is one")
    parser.add_argument("--out", type=Path, help="output folder; default: runs/PRESET")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in the output folder")
    parser.add_argument("--no-baseline", dest="baseline", action="store_false", help="leave out plain PyTorch")
    parser.add_argument(
        "--backend",
        choices=["inductor", "llmk"],
        default="inductor",
        help="llmk: compile the plain model with llmk's backend too; default: inductor",
    )
    return parser.parse_args(argv)


def prepare(args: argparse.Namespace) -> tuple[Settings, Path]:
    """Fill in the defaults, check what was given, and tokenize the text; returns the settings and the tokens' file."""
    args.device = choose_device(args.device)
    args.preset = args.preset or ("1b" if args.device.type == "cuda" else "tiny")
    args.out = args.out or Path("runs", args.preset)
    preset = PRESETS[args.preset]
    args.steps = args.steps or preset.steps
    batch_size, seq_len = args.batch_size or preset.batch_size, args.seq_len or preset.seq_len
    vocab_size = args.vocab_size or preset.model.vocab_size
    if vocab_size < MIN_VOCAB_SIZE:
        raise InputError(f"--vocab-size: expected at least {MIN_VOCAB_SIZE}, got {vocab_size}")
    if not 0 <= args.seed < 2**32:
        raise InputError(f"--seed: expected a number from 0 to {2**32 - 1}, got {args.seed}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out: cannot make the folder {args.out}: {error.strerror}") from error
    print(f"reading {args.text or 'the Python standard library'}", flush=True)
    tokens = tokenize(read_text(args.text), vocab_size, args.out)
    if count_tokens(tokens) <= batch_size * seq_len:
        raise InputError(
            f"--text: {count_tokens(tokens)} tokens are too few for one batch of {batch_size} x {seq_len} and one more"
        )
    settings = Settings(
        args.preset, vocab_size, batch_size, seq_len, args.lr or preset.lr, args.seed, tokens.parent.name
    )
    return settings, tokens


def choose_device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device("cuda:0" if name == "cuda" else name)
    except RuntimeError as error:
        raise InputError(f"--device: expected cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"--device: expected cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        raise InputError(f"--device: {name} is asked for, and there are {torch.cuda.device_count()} CUDA devices")
    return device


def prepare_checkpoints(args: argparse.Namespace, jobs: list[Job]) -> None:
    """Check that the checkpoints can be continued, or clear them away for a run from the start."""
    if not args.resume:
        for run in RUNS:
            (args.out / f"{run}.pt").unlink(missing_ok=True)
    elif not jobs[0].checkpoint.exists():
        raise InputError(f"--resume: there is no checkpoint {jobs[0].checkpoint}")
    for job in jobs:
        if job.checkpoint.exists():
            check_checkpoint(job)


def check_checkpoint(job: Job) -> None:
    try:
        checkpoint = torch.load(job.checkpoint, mmap=True, weights_only=True)
        then, done = checkpoint["settings"], len(Result.from_dict(checkpoint["result"]).losses)
    except Exception as error:
        raise InputError(f"--resume: cannot read the checkpoint {job.checkpoint}") from error
    for field in fields(Settings):
        old, new = then.get(field.name), getattr(job.settings, field.name)
        if old != new:
            option = field.name.replace("_", "-")
            raise InputError(f"--resume: {job.checkpoint} was trained with --{option} {old}, this run has {new}")
    if done > job.steps:
        raise InputError(f"--resume: {job.checkpoint} is at step {done}, past --steps {job.steps}")


# ---- one run, in a process of its own


def in_a_fresh_process(function: Callable[[Job], Result], job: Job) -> Result:
    """A process of its own for each run, so that neither inherits the other's memory or compiled code."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, job).result()


def train(job: Job) -> Result:
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    settings, preset = job.settings, PRESETS[job.settings.preset]
    config = replace(preset.model, vocab_size=settings.vocab_size)
    blocks, backend = RUNS[job.run]
    model = Llama(config, BLOCKS[type(config)][blocks], settings.seq_len, device=job.device, dtype=preset.dtype)
    model.initialize(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    result = restore(job, model, optimizer)
    if len(result.losses) == job.steps:
        return result

    batches = Batches(job.tokens, settings.batch_size, settings.seq_len, settings.seed)
    loss_of = torch.compile(model, fullgraph=True, backend=backend)
    meter = Meter(job.device, settings.batch_size * settings.seq_len, WARMUP_STEPS)
    saved = time.monotonic()
    bar = progress_bar(result, job.steps)
    first = len(result.losses)
    for step in bar:
        with meter, compiling(bar) if step == first else contextlib.nullcontext():
            tokens, target = (x.to(job.device) for x in batches(step))
            loss = loss_of(tokens, target)
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * min(1.0, (step + 1) / LR_WARMUP_STEPS)
            optimizer.step()
            optimizer.zero_grad()
            result.losses.append(loss.item())  # waits for the device
        result.measured = meter.read()
        bar.set_postfix_str(summary(result), refresh=False)
        if step + 1 == job.steps or time.monotonic() - saved > CHECKPOINT_SECONDS:
            save(job, model, optimizer, result)
            saved = time.monotonic()
    return result


def save(job: Job, model: Llama, optimizer: torch.optim.Optimizer, result: Result) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    unfinished = job.checkpoint.with_suffix(".unfinished")
    torch.save({"settings": asdict(job.settings), "result": asdict(result), **state}, unfinished)
    unfinished.replace(job.checkpoint)  # in one step: an interruption leaves the last checkpoint whole


def restore(job: Job, model: Llama, optimizer: torch.optim.Optimizer) -> Result:
    """Continue from the checkpoint if there is one; the result holds the losses of the steps that are done."""
    if not job.checkpoint.exists():
        return Result(job.run, losses=[])
    checkpoint = torch.load(job.checkpoint, map_location=job.device, mmap=True, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return Result.from_dict(checkpoint["result"])


if __name__ == "__main__":
    main()
