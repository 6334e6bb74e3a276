"""`lm export`: a trained model as files for other programs."""

import argparse
from pathlib import Path

from data_prep.errors import UserError
from lm.commands.arguments import RUN, SWITCH, Options, open_run

HELP = "a trained model with a short script that computes it without this package"
OPTIONS: Options = RUN | {
    "folder": {"metavar": "DIR", "help": "new folder to write"},
    "--bf16": SWITCH | {"help": "round weights to bf16"},
    "--onnx": SWITCH | {"help": "also nll.onnx, and of an LSTM step.onnx, for recognisers"},
    "--hf": SWITCH | {"help": "instead a Transformer as a model of Hugging Face's transformers"},
    "--int8": SWITCH | {"help": "with --onnx: also files with weights in 8 bits"},
}


def run(options: argparse.Namespace) -> None:
    """Write the folder; print it."""
    if options.int8 and not options.onnx:
        raise UserError("--int8 requires --onnx")
    from lm.export import export

    options.device, options.threads = "cpu", None
    if options.hf and (options.bf16 or options.onnx):
        raise UserError("--hf excludes --bf16 and --onnx")
    kinds = {name: getattr(options, name) for name in ("bf16", "onnx", "int8", "hf")}
    export(open_run(options), Path(options.folder), **kinds)
    print(options.folder)
