"""The program `wholebatch`: one function a command; what a command needs is imported when it runs."""

from __future__ import annotations

import difflib
import os
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from wholebatch import WholeBatchError, __version__

if TYPE_CHECKING:
    from wholebatch.train import Config

C = TypeVar("C", bound="Config")

USAGE = """\
wholebatch: train on the batch you meant, on the memory you have.

  wholebatch train [CONFIG.yaml] [flags]   train; without flags, a language model on Python's own docstrings
  wholebatch train --resume RUN            go on with a run that was stopped or killed
  wholebatch train --help                  every flag
  wholebatch plan [CONFIG.yaml] [flags]    what a step will take: the largest micro-batch, time and memory by part
  wholebatch batch-size RUN [flags]        which batch a run should have, from the noise it measured or from branches
  wholebatch doctor SCRIPT [ARGS]          watch a training loop of any kind and say what is wrong with its sums
  wholebatch env                           what to paste into a report of a problem
  wholebatch --version
"""

PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "rich",
    "tyro",
    "PyYAML",
    "transformers",
    "accelerate",
    "lightning",
    "ultralytics",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: what stands behind the program's name; by default the command line.

    Returns:
        The exit status: 0; 1 for an error in what was given, which is written to stderr; 2 for an unknown command;
        128 and the signal for a run that was stopped.
    """
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, 1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        return _refused(f"there is no command '{command}'.{hint} See: wholebatch --help", status=2)
    if rest and command not in ("train", "plan", "batch-size", "doctor"):
        return _refused(f"{command} takes no arguments, but got {' '.join(rest)}.", status=2)
    try:
        return COMMANDS[command](rest)
    except WholeBatchError as error:
        return _refused(str(error), status=1)
    except KeyboardInterrupt:  # before the first step or after the last; in between, a run saves itself and ends
        return _refused("interrupted.", status=128 + signal.SIGINT)
    except BrokenPipeError:  # who reads has seen enough, as `| head` does; what is still to be flushed goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:  # of a file that the user named, in a place where nothing more is known
        if error.filename is None:
            raise
        return _refused(f"{error.filename}: {error.strerror}.", status=1)


def train(arguments: list[str]) -> int:
    """Train, with settings from an optional YAML file and flags that go before it."""
    from wholebatch.train import Config
    from wholebatch.train import train as run

    outcome = run(_settings(Config, "train", arguments))
    status = 0 if outcome.signal is None else 128 + outcome.signal
    if "TORCHELASTIC_RUN_ID" in os.environ:  # gloo's threads may abort a process that tears down after all is done
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def plan(arguments: list[str]) -> int:
    """Say what a step will take, asked with the settings of a training run."""
    from wholebatch.train.plan_command import Question, advise

    advise(_settings(Question, "plan", arguments))
    return 0


def batch_size(arguments: list[str]) -> int:
    """Say which batch a run should have."""
    from wholebatch.train.batch_size_command import advise, asked

    advise(asked(arguments))
    return 0


def doctor(arguments: list[str]) -> int:
    """Watch a training script for a few steps: 0 when it is clean, 1 with findings, 2 when it could not look."""
    from wholebatch.doctor.command import main as run

    return run(arguments)


def env(arguments: list[str]) -> int:
    """Print versions and devices."""
    import torch

    lines = {
        "wholebatch": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "processors": str(os.cpu_count()),
        **{name: _installed(name) for name in PACKAGES},
        "devices": ", ".join(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))) or "cpu only",
        "threads": str(torch.get_num_threads()),
    }
    for name, value in lines.items():
        print(f"{name:<14}{value}")
    return 0


def version(arguments: list[str]) -> int:
    """Print the version."""
    print(f"wholebatch {__version__}")
    return 0


def usage(arguments: list[str]) -> int:
    """Print the commands."""
    print(USAGE, end="")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "plan": plan,
    "batch-size": batch_size,
    "doctor": doctor,
    "env": env,
    "--version": version,
    "--help": usage,
    "-h": usage,
}


def _settings(kind: type[C], command: str, arguments: list[str]) -> C:
    """Read an optional YAML file, then flags."""
    import tyro

    from wholebatch.train import config

    named = bool(arguments) and not arguments[0].startswith("-")
    default = kind(**vars(config.load(Path(arguments[0])))) if named else kind()
    flags = arguments[1:] if named else arguments
    return tyro.cli(kind, prog=f"wholebatch {command} [CONFIG.yaml]", args=flags, default=default)


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _refused(reason: str, status: int) -> int:
    """Say why on stderr, in one line that a script can find."""
    print(f"wholebatch: {reason}", file=sys.stderr)
    return status
