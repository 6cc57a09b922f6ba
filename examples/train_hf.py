"""Train a Hugging Face language model that `llmk.transformers.patch` has patched, on one device or many.

    python examples/train_hf.py                       # a size for this machine: llama-nano on a CPU, llama-1b on a GPU
    python examples/train_hf.py --model qwen3-0.6b --plain    # unpatched, to compare
    torchrun --nproc-per-node 2 examples/train_hf.py --parallel fsdp
    torchrun --nproc-per-node 4 examples/train_hf.py --parallel fsdp --resume --steps 500

The model is built from its configuration with random weights; nothing is downloaded. The ways to spread it, all of them
PyTorch's own:

    none    one process
    ddp     each process has the whole model and a part of the batch (DistributedDataParallel)
    fsdp    as ddp, but each process keeps a part of the weights, gradients and optimizer (FSDP2, fully_shard)
    tp      each process has a part of every layer and the whole batch (llmk.transformers.tensor_parallel)

All see the same batches and train the same model: losses agree but for rounding. `--batch-size` counts the sequences of
all processes together. In bfloat16, weights and optimizer are kept in float32. The layers are compiled one by one, so
that parameters are gathered and gradients summed between and beside them.

The output folder then holds run.json, loss.png and the last checkpoint, which any way and number of processes can
continue.
"""

import argparse
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import sharded_checkpoint
import torch
from arguments import InputError, Parser, fail, positive
from hf_models import PRESETS, build
from meter import Meter
from parallel import (
    WAYS,
    Processes,
    arrange,
    clip_gradients,
    compile_layers,
    data_parallel_size,
    parameter_groups,
)
from report import Result, compare, plot_losses, progress_bar, save_json, summary
from sharded_checkpoint import CheckpointError
from text import Batches, TextError, count_tokens, read_text, tokenize

import llmk.transformers

WARMUP_STEPS = 2  # the first compiles; both are left out of the speed and the memory
LR_WARMUP_STEPS = 20
CHECKPOINTS = "checkpoints"  # in the output folder
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """The settings that decide a run's losses but for rounding. A checkpoint is continued only with the same ones."""

    model: str
    batch_size: int
    seq_len: int
    lr: float
    clip: float | None
    seed: int
    dtype: str
    text: str  # names the cached tokens, and with them the text


@dataclass(frozen=True)
class Job:
    """Return what `make` returns in the first process, in every process."""

    settings: Settings
    tokens: Path
    checkpoint: Path | None  # to continue


def main(argv: list[str] | None = None) -> None:
    processes = Processes()
    args = parse_arguments(argv, processes)
    try:
        with ending_together(args, processes):
            job = processes.from_first(lambda: prepare(args), (InputError, TextError))
            result = train(args, job, processes)
            if processes.rank == 0:
                finish(args, job.settings, result, processes.count)
    except (InputError, TextError) as error:
        fail(str(error), 2)


@contextmanager
def ending_together(args: argparse.Namespace, processes: Processes) -> Iterator[None]:
    """Run as one of several processes, where there are: what goes wrong in one ends all, and one says what it was."""
    try:
        if args.device.type == "cuda":
            torch.cuda.set_device(args.device)
        if args.parallel != "none":
            processes.start(args.device)
        yield
    except (InputError, TextError):  # found by all
        processes.end()
        raise
    except torch.OutOfMemoryError:
        processes.give_up(f"out of memory on {args.device}: try a smaller --batch-size, --seq-len or --model", 1)
    except KeyboardInterrupt:
        processes.give_up("interrupted; --resume continues from the last checkpoint, if one was written", 130)
    except Exception:
        processes.give_up(traceback.format_exc(), 1)
    processes.end()


# ---- training


def train(args: argparse.Namespace, job: Job, processes: Processes) -> Result:
    """Called in every process. The losses are those of the whole batch in each."""
    settings = job.settings
    model = build(PRESETS[settings.model], settings.seq_len, settings.seed, args.device)
    if not args.plain:
        report = llmk.transformers.patch(model)  # before anything wraps the model
        if processes.rank == 0:
            print(report, flush=True)
    if args.compile:
        compile_layers(model, loss_too=args.plain)
    try:
        module, part = arrange(model, args.parallel, DTYPES[settings.dtype], processes)
    except ValueError as error:
        raise InputError(f"--parallel {args.parallel}: {error}") from error
    groups = parameter_groups(model)
    optimizer = torch.optim.AdamW([{"params": g} for g in groups], betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    result = Result(blocks_of(args), losses=[])
    if job.checkpoint is not None:
        result = Result.from_dict(sharded_checkpoint.restore(job.checkpoint, model, optimizer)["result"])

    batches = Batches(job.tokens, settings.batch_size, settings.seq_len, settings.seed)
    meter = Meter(args.device, settings.batch_size * settings.seq_len, WARMUP_STEPS)
    bar = progress_bar(result, args.steps, shown=processes.rank == 0)
    for step in bar:
        with meter:
            input_ids, target = (part.of(x).to(args.device) for x in batches(step))
            loss = module(input_ids=input_ids, labels=target, shift_labels=target).loss
            loss.backward()
            if settings.clip is not None:
                clip_gradients(groups, settings.clip)
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * min(1.0, (step + 1) / LR_WARMUP_STEPS)
            optimizer.step()
            optimizer.zero_grad()
            result.losses.append(processes.mean(loss.detach()))  # waits for the device
        result.measured = meter.read()
        bar.set_postfix_str(summary(result), refresh=False)
        if args.checkpoint_every and ((step + 1) % args.checkpoint_every == 0 or step + 1 == args.steps):
            record = {"settings": asdict(settings), "result": asdict(result)}
            sharded_checkpoint.save(args.out / CHECKPOINTS, step + 1, model, optimizer, record)
    return result


def blocks_of(args: argparse.Namespace) -> str:
    return "plain" if args.plain else "llmk"


def finish(args: argparse.Namespace, settings: Settings, result: Result, devices: int) -> None:
    assert result.measured is not None
    dtype, each = DTYPES[settings.dtype], result.measured.tokens_per_second / devices
    print(compare([result], dtype))
    print(f"{'tokens/s of each device':<28}{each:>16,.0f}   ({args.parallel}, {devices} in all)")
    title = f"{settings.model}, {args.parallel}, on {devices} {args.device.type}"
    plot_losses(args.out / "loss.png", title, [result])
    config = asdict(settings) | {"steps": args.steps, "parallel": args.parallel, "devices": devices}
    config |= {"compile": args.compile, "tokens_per_second_of_each_device": each}
    save_json(args.out / "run.json", config, args.device, [result], dtype)
    print(f"\nwritten: {args.out / 'run.json'}, {args.out / 'loss.png'}")


# ---- what the user asked for


def parse_arguments(argv: list[str] | None, processes: Processes) -> argparse.Namespace:
    """Every process reads the same arguments and finds the same faults."""
    assert __doc__ is not None
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PRESETS, help="default: llama-nano on a CPU, llama-1b on a GPU")
    parser.add_argument("--plain", action="store_true", help="leave the model unpatched")
    parser.add_argument("--parallel", choices=WAYS, help="default: none for one process, fsdp for more")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="or run the layers eagerly"
    )
    parser.add_argument("--text", type=Path, help="a file or a folder; default: the Python standard library's sources")
    parser.add_argument("--steps", type=positive(int), help="how many steps to train in all; default: the model's")
    parser.add_argument("--batch-size", type=positive(int), help="sequences in a batch; default: the model's")
    parser.add_argument("--seq-len", type=positive(int), help="tokens in a sequence; default: the model's")
    parser.add_argument("--lr", type=positive(float), help="learning rate; default: the model's")
    parser.add_argument("--clip", type=positive(float), help="largest norm of all gradients; default: any")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches; default: 0")
    parser.add_argument("--dtype", choices=DTYPES, help="of the computation; default: float32 on a CPU, else bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--out", type=Path, default=Path("runs/hf"), help="output folder; default: runs/hf")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in the output folder")
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        default=100,
        metavar="N",
        help="steps from one checkpoint to the next; the last step has one too; 0: none; default: 100",
    )
    args = parser.parse_args(argv)
    try:
        fill_in(args, processes)
    except InputError as error:
        parser.error(str(error))
    return args


def fill_in(args: argparse.Namespace, processes: Processes) -> None:
    """The defaults, which depend on the device and the number of processes; and what does not go together."""
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_host = processes.count_on_host
    if kind == "cuda" and on_host > torch.cuda.device_count():
        raise InputError(f"--device: {on_host} processes need as many CUDA devices; {torch.cuda.device_count()} here")
    args.device = torch.device(kind, processes.local_rank) if kind == "cuda" else torch.device(kind)
    args.dtype = args.dtype or ("bfloat16" if kind == "cuda" else "float32")
    args.model = args.model or ("llama-1b" if kind == "cuda" else "llama-nano")
    args.parallel = args.parallel or ("none" if processes.count == 1 else "fsdp")
    if args.parallel == "none" and processes.count > 1:
        raise InputError(f"--parallel: none is for one process, and there are {processes.count}: ddp, fsdp or tp")
    preset, parts = PRESETS[args.model], data_parallel_size(args.parallel, processes)
    args.steps = args.steps or preset.steps
    args.batch_size = args.batch_size or preset.batch_size
    args.seq_len = args.seq_len or preset.seq_len
    args.lr = args.lr or preset.lr
    if args.batch_size % parts:
        raise InputError(f"--batch-size: {args.batch_size} sequences cannot be shared by {parts} processes")
    if not 0 <= args.seed < 2**32:
        raise InputError(f"--seed: expected a number from 0 to {2**32 - 1}, got {args.seed}")
    if args.checkpoint_every < 0:
        raise InputError(f"--checkpoint-every: expected a number of steps, or 0, got {args.checkpoint_every}")


def prepare(args: argparse.Namespace) -> Job:
    """Tokenize the text, find or clear away checkpoints."""
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out: cannot make the folder {args.out}: {error.strerror}") from error
    print(f"reading {args.text or 'the Python standard library'}", flush=True)
    tokens = tokenize(read_text(args.text), PRESETS[args.model].text_vocab_size, args.out)
    count, needed = count_tokens(tokens), args.batch_size * args.seq_len
    if count <= needed:
        raise InputError(f"--text: {count} tokens are too few for one batch of {needed} and one more")
    settings = settings_of(args, tokens.parent.name)
    folder = args.out / CHECKPOINTS
    if args.resume:
        return Job(settings, tokens, checkpoint_to_continue(folder, settings, args.steps))
    shutil.rmtree(folder, ignore_errors=True)
    return Job(settings, tokens, None)


def settings_of(args: argparse.Namespace, text: str) -> Settings:
    return Settings(args.model, args.batch_size, args.seq_len, args.lr, args.clip, args.seed, args.dtype, text)


def checkpoint_to_continue(folder: Path, settings: Settings, steps: int) -> Path:
    try:
        checkpoint = sharded_checkpoint.newest(folder)
        record = sharded_checkpoint.read_record(checkpoint)
        then, done = record["settings"], len(record["result"]["losses"])
    except CheckpointError as error:
        raise InputError(f"--resume: {error}") from error
    for field in fields(Settings):
        old, new = then.get(field.name), getattr(settings, field.name)
        if old != new:
            option = field.name.replace("_", "-")
            raise InputError(f"--resume: {checkpoint} was trained with --{option} {old}, this run has {new}")
    if done > steps:
        raise InputError(f"--resume: {checkpoint} is at step {done}, past --steps {steps}")
    return checkpoint


if __name__ == "__main__":
    main()
