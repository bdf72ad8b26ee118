"""The command line: `python -m benchmarks OPERATION | sharding | programs | compiled | curves | fit | plot | compare | selftest`."""

from __future__ import annotations

import argparse
import importlib
import os
import pathlib
import sys

# Before JAX starts: leave room for PyTorch on the same GPU, and keep C++ chatter off the table.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

OPERATIONS = (
    "softmax",
    "fused_softmax",
    "score",
    "elementwise",
    "elementwise_kernel",
    "row_kernel",
    "scan",
    "while_loop",
    "associative_scan",
    "quantize",
    "reduction",
    "norm",
    "cross_entropy",
    "linear_cross_entropy",
    "index_add",
    "scatter",
    "select",
    "selected",
    "segment_softmax",
    "messages",
    "sparse",
)
RESULTS = pathlib.Path(__file__).parent / "results"
PARTS = pathlib.Path(__file__).parent.parent / "results"  # which git ignores


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Speed beside peers and beside a plain copy."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in OPERATIONS:
        p = commands.add_parser(name, help=f"measure {name}")
        p.add_argument("--quick", action="store_true", help="a few shapes, fewer repeats")
        p.add_argument(
            "--cases", default="", metavar="REGEX", help="only the cases whose name matches, as in '49152x1024'"
        )
        p.add_argument("--dtypes", type=_names, default=(), metavar="A,B", help="float16,bfloat16,float32,float64")
        p.add_argument(
            "--ops",
            type=_names,
            default=(),
            metavar="A,B",
            help="the operations of the family, as in 'softmax,log_softmax'",
        )
        p.add_argument("--repeats", type=int, default=0, help="timed executions of each candidate")
        p.add_argument(
            "--algorithms",
            action="store_true",
            help="time every algorithm that can run a case, not only the default one (GPU)",
        )
        p.add_argument("--inspect", action="store_true", help="show errors against float64 instead of times")
        _add_out(p)
    p = commands.add_parser("sharding", help="measure what several devices are worth")
    p.add_argument("--quick", action="store_true", help="small arrays")
    p.add_argument("--cases", default="", metavar="REGEX", help="only the cases whose name matches, as in 'softmax'")
    p.add_argument(
        "--devices",
        type=lambda text: [int(n) for n in _names(text)],
        default=(),
        metavar="A,B",
        help="numbers of devices",
    )
    p.add_argument("--repeats", type=int, default=0, help="readings of the clock")
    _add_out(p)
    p = commands.add_parser("programs", help="measure whole programs, plain and under jaxkern.accelerate()")
    p.add_argument("--quick", action="store_true", help="small programs")
    p.add_argument("--cases", default="", metavar="REGEX", help="only the programs whose name and dtype match")
    p.add_argument("--repeats", type=int, default=0, help="readings of the clock")
    p.add_argument("--explain", action="store_true", help="show what a GPU would take, instead of times")
    p.add_argument(
        "--only",
        action="append",
        metavar="A,B",
        help="measure under accelerate(only=(A, B)) too; 'default' stands for the default operations; may be repeated",
    )
    p.add_argument(
        "--without",
        action="append",
        metavar="A,B",
        help="measure under accelerate(without=(A, B)) too; may be repeated",
    )
    p.add_argument(
        "--pyg",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="time limit of PyTorch Geometric, per graph network and dtype; 0 leaves it out",
    )
    p.add_argument("--force", action="store_true", help="these sets take every case that kernels can run")
    p.add_argument("--tune", action="store_true", help="measure under accelerate(tune=True) too")
    p.add_argument("--deterministic", action="store_true", help="measure under accelerate(deterministic=True) too")
    _add_out(p)
    p = commands.add_parser("compiled", help="what XLA makes of the programs on an H100, without a GPU")
    p.add_argument("--quick", action="store_true", help="small programs")
    p.add_argument("--cases", default="", metavar="REGEX", help="only the programs whose name and dtype match")
    p.add_argument("--deterministic", action="store_true", help="also under accelerate(deterministic=True)")
    p = commands.add_parser(
        "curves", help="compare the losses of programs in training, plain and under jaxkern.accelerate()"
    )
    p.add_argument("--quick", action="store_true", help="small programs")
    p.add_argument("--cases", default="", metavar="REGEX", help="only the programs whose name and dtype match")
    p.add_argument("--seeds", type=int, default=4, help="runs of each program, from other parameters")
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--only", action="append", metavar="A,B", help="as for programs")
    p.add_argument("--without", action="append", metavar="A,B", help="as for programs")
    p.add_argument("--force", action="store_true", help="take every case that kernels can run, as without a GPU")
    _add_out(p)
    p = commands.add_parser(
        "fit", help="fit the model of costs to half of the measured regions, and judge it on the others"
    )
    p.add_argument("file", type=pathlib.Path, nargs="?", default=RESULTS / "row_kernel-NVIDIA_H200.json")
    p.add_argument("--seeds", type=int, default=3, help="ways to halve the regions")
    p = commands.add_parser("plot", help="draw the figures of result files, for light and for dark pages")
    p.add_argument(
        "files",
        type=pathlib.Path,
        nargs="*",
        help="drawn beside the files; default: benchmarks/results, to docs/figures",
    )
    p = commands.add_parser("compare", help="what changed from one result file to another")
    p.add_argument("old", type=pathlib.Path)
    p.add_argument("new", type=pathlib.Path)
    p = commands.add_parser("merge", help="put the cells of a new run of the same machine into a result file")
    p.add_argument("file", type=pathlib.Path, help="result file; cells that the new run lacks keep their commit")
    p.add_argument("new", type=pathlib.Path)
    commands.add_parser("selftest", help="check the clock that the measurements rest on")
    return parser


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        metavar="DIR",
        help="where results go (default: benchmarks/results for a whole run, results for a quick one and for some cases)",
    )


def _choose_out(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Sets `arguments.out`: a file of benchmarks/results is replaced by a whole run alone."""
    partial = [name for name in ("quick", "cases", "dtypes", "ops", "devices") if getattr(arguments, name, None)]
    arguments.out = arguments.out or (PARTS if partial else RESULTS)
    if arguments.quick and arguments.out.resolve() == RESULTS.resolve():
        parser.error(f"--quick does not write to {arguments.out}, which holds whole runs: choose another --out")


def _names(text: str) -> tuple[str, ...]:
    return tuple(n for n in text.replace(",", " ").split() if n)


def main(argv: list[str]) -> int:
    if argv[:1] == ["--compare"]:
        argv = ["compare", *argv[1:]]
    parser = _parser()
    arguments = parser.parse_args(argv)
    if hasattr(arguments, "out"):
        _choose_out(parser, arguments)
    from benchmarks import _report

    if arguments.command == "compare":
        print(_report.compare(_report.load(arguments.old), _report.load(arguments.new)))
        return 0
    if arguments.command == "merge":
        data = _report.merge(_report.load(arguments.file), _report.load(arguments.new))
        print(_report.header(data), f"written: {_report.save(data, arguments.file.parent)}", sep="\n")
        return 0
    if arguments.command == "plot":
        from benchmarks import _plot

        files = [_plot.plot(_report.load(file), file.with_suffix("")) for file in arguments.files] or [_plot.plot_all()]
        print(*(f"written: {path}" for paths in files for path in paths), sep="\n")
        return 0
    if arguments.command == "selftest":
        from benchmarks import selftest

        return selftest.main()
    if arguments.command == "sharding":
        from benchmarks import sharding

        return _write(data := sharding.run(arguments), sharding.table(data), arguments.out)
    if arguments.command == "programs":
        from benchmarks import programs

        if arguments.explain:
            return programs.explain(arguments)
        return _write(data := programs.run(arguments), programs.table(data), arguments.out)
    if arguments.command == "compiled":
        from benchmarks import compiled

        return compiled.run(arguments)
    if arguments.command == "fit":
        from benchmarks import fit

        print(fit.run(_report.load(arguments.file), arguments.seeds))
        return 0
    if arguments.command == "curves":
        from benchmarks import curves

        path = _report.save(data := curves.run(arguments), arguments.out)
        print(_report.header(data), curves.table(data), f"written: {path}", sep="\n")
        return int(any(not goal["met"] for row in data["results"] for goal in row["goals"]))
    return _operation(arguments)


def _operation(arguments: argparse.Namespace) -> int:
    import jax

    from benchmarks import _report, _run

    if "float64" in arguments.dtypes:
        jax.config.update("jax_enable_x64", True)
    operation = importlib.import_module(f"benchmarks.{arguments.command}")
    unknown = set(arguments.ops) - set(operation.OPS)
    if unknown:
        raise SystemExit(
            f"benchmarks: {arguments.command} has no {', '.join(sorted(unknown))}; it has {', '.join(operation.OPS)}"
        )
    options = _run.Options(
        arguments.quick, arguments.cases, arguments.dtypes, arguments.ops, arguments.repeats, arguments.algorithms
    )
    if arguments.inspect:
        accuracy = importlib.import_module(f"benchmarks.{arguments.command}_accuracy")
        return accuracy.main(options, arguments.out)

    data = _run.run(operation, options)
    return _write(data, _report.table(data), arguments.out)


def _write(data: dict, table: str, out: pathlib.Path) -> int:
    """Saves a run, prints its table, and draws its figures: beside the file, or all of docs/figures for benchmarks/results."""
    from benchmarks import _plot, _report

    path = _report.save(data, out)
    print(_report.header(data), table, _report.summary(data), f"written: {path}", sep="\n")
    whole = out.resolve() == RESULTS.resolve()
    for figure in _plot.plot_all() if whole else _plot.plot(data, path.with_suffix("")):
        print(f"written: {figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
