"""The house's rules, as far as a test can hold them."""

from __future__ import annotations

import ast
import configparser
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from recipes.pretrain import parse_arguments
from recipes.runfile import load_run

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "recipes").rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCES
}
# Names of packages that a user of this project is likely to have installed.
LIKELY = """
    torch accelerate deepspeed transformers datasets evaluate tokenizers safetensors numpy pandas
    pyarrow pydantic tenacity tqdm packaging huggingface_hub tensorboard wandb mlflow trackio yaml
    ruamel pytest hypothesis regex requests psutil ninja einops rich attr hjson filelock fsspec
    triton apex peft trl diffusers tests docs benchmarks examples launch setup
"""
TOP_LEVEL = """
    setup.cfg README.md recipes ds_configs accelerate_configs tests hostfile pyproject.toml
    constraints.txt LICENSE Makefile .ci docs benchmarks .gitignore
"""

DOCUMENTS = [*ROOT.glob("README.md"), *sorted((ROOT / "docs").rglob("*.md"))]

Function = ast.FunctionDef | ast.AsyncFunctionDef


def show(path: Path, node: ast.AST) -> str:
    """Where something stands, as an editor opens it."""
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def functions() -> Iterator[tuple[Path, Function]]:
    """Every function of recipes/."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield path, node


def public(node: ast.Module | ast.ClassDef) -> Iterator[Function | ast.ClassDef]:
    """Public functions and classes of a module, and the public methods of those classes."""
    for child in node.body:
        if isinstance(child, (Function, ast.ClassDef)) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from public(child)


def length(node: ast.AST) -> int:
    """Lines from the definition to the last statement."""
    return (getattr(node, "end_lineno", 0) or 0) - getattr(node, "lineno", 0) + 1


# ---- sizes


def test_the_rules_look_at_the_whole_project() -> None:
    assert {"recipes.pretrain", "recipes.engine.build", "recipes.config"} <= MODULES.keys()
    assert len(list(functions())) > 100


def test_a_function_fits_on_a_screen() -> None:
    long = [f"{show(p, f)} {f.name}: {length(f)}" for p, f in functions() if length(f) > 60]
    assert not long, "functions above 60 lines"


def test_a_file_fits_in_the_head() -> None:
    sizes = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in SOURCES}
    long = [f"{p.relative_to(ROOT)}: {n}" for p, n in sizes.items() if n > 300]
    assert not long, "files above 300 lines"


def test_the_loop_is_one_function_of_the_recipe() -> None:
    tree = TREES[MODULES["recipes.pretrain"]]
    (train,) = [n for n in tree.body if isinstance(n, Function) and n.name == "train"]
    assert any(isinstance(node, ast.While) for node in ast.walk(train))
    assert length(train) <= 60


def test_test_files_fit_in_the_head_too() -> None:
    sizes = {
        p.relative_to(ROOT): len(p.read_text(encoding="utf-8").splitlines())
        for p in sorted((ROOT / "tests").rglob("*.py"))
    }
    assert not [f"{p}: {n}" for p, n in sizes.items() if n > 400], "test files above 400 lines"


# ---- words that are not said


def test_nothing_is_printed() -> None:
    found = [
        show(path, node)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not found, "print instead of the module's logger"


def test_no_exception_is_caught_whatever_it_is() -> None:
    broad = {"Exception", "BaseException"}
    found = []
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                kinds = ast.walk(node.type) if node.type is not None else []
                names = {n.id for n in kinds if isinstance(n, ast.Name)}
                if node.type is None or names & broad:
                    found.append(show(path, node))
    assert not found, "bare or broad except"


# ---- types and docstrings


def test_every_function_is_typed() -> None:
    found = []
    for path, function in functions():
        given = function.args
        named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        named += [a for a in (given.vararg, given.kwarg) if a is not None]
        bare = [a.arg for a in named if a.annotation is None and a.arg not in ("self", "cls")]
        if bare or function.returns is None:
            found.append(f"{show(path, function)} {function.name} {bare}")
    assert not found, "functions without types"


def test_every_public_function_and_class_says_what_it_is() -> None:
    found = [
        f"{show(path, node)} {node.name}"
        for path, tree in TREES.items()
        for node in public(tree)
        if not ast.get_docstring(node)
    ]
    found += [show(path, tree) for path, tree in TREES.items() if not ast.get_docstring(tree)]
    assert not found, "no docstring"


# ---- imports


def imported(tree: ast.AST, *, at_import: bool) -> Iterator[str]:
    """Modules that are imported; with `at_import` only those that importing the module needs."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif at_import and (
            isinstance(node, (Function, ast.Lambda))
            or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ):
            continue
        else:
            yield from imported(node, at_import=at_import)


def test_only_the_engine_knows_accelerate_and_deepspeed() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in TREES.items()
        if path.parent != ROOT / "recipes" / "engine"
        for name in imported(tree, at_import=False)
        if name.split(".")[0] in ("accelerate", "deepspeed")
    ]
    assert not found


def test_no_module_bears_the_name_of_another() -> None:
    # recipes/ stands first on sys.path when recipes/pretrain.py is launched by path.
    names = {part for module in MODULES for part in module.split(".")[1:]}
    assert names and not names & (set(sys.stdlib_module_names) | set(LIKELY.split()))


def test_no_import_goes_in_a_circle() -> None:
    arrows = {
        module: {name for name in imported(TREES[path], at_import=True) if name in MODULES}
        for module, path in MODULES.items()
    }
    assert "recipes.config" in arrows["recipes.objective"]  # arrows are found at all
    done: set[str] = set()

    def follow(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for other in sorted(arrows[module] - {module}):
                follow(other, (*way, module))
            done.add(module)

    for module in arrows:
        follow(module, ())


TORCHLESS = [
    "recipes.config",
    "recipes.runfile",
    "recipes.objective",
    "recipes.metrics",
    "recipes.outcome",
]
TORCHLESS += ["recipes.runfolder", "recipes.engine.strategy", "recipes.verb"]
TORCHLESS += ["recipes.artifacts.verbs", "recipes.artifacts.checkpoint_verbs"]
NAMED_ARRAYS = {f"recipes.checkpoint.{name}" for name in ("arrays", "pieces", "snapshot")}
TORCHLESS += [m for m in MODULES if m.startswith("recipes.checkpoint.") and m not in NAMED_ARRAYS]
TORCHLESS += ["recipes.pretrain", "recipes.measure", "recipes.cli"]
ROOMS_WITHOUT_TORCH = (
    "recipes.advice",
    "recipes.cluster",
    "recipes.planner",
    "recipes.preflight",
)
ROOMS_WITHOUT_TORCH += ("recipes.rehearsal",)
RUNS_ON_RANKS = "recipes.preflight.measuring"
TORCHLESS += [m for m in MODULES if m.startswith(ROOMS_WITHOUT_TORCH) and m != RUNS_ON_RANKS]


def test_what_needs_no_torch_does_not_import_it() -> None:
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformers', 'accelerate', 'deepspeed'} & set(sys.modules)\n"
        "    if heavy: sys.exit(f'{name} imports {heavy}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *TORCHLESS], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# ---- what is written down


def commands() -> list[tuple[str, list[str]]]:
    """Commands that start the recipe in documents, docstrings and the heads of YAML files."""
    documents = [*DOCUMENTS, *sorted((ROOT / "recipes" / "runs").glob("*.yaml"))]
    documents += sorted((ROOT / "accelerate_configs").glob("*.yaml"))
    documents.append(ROOT / "recipes" / "pretrain.py")
    found = []
    for path in documents:
        text = re.sub(r"(?m)^#\s?", "", path.read_text(encoding="utf-8"))
        for line in re.sub(r"\\\n\s*", " ", text).splitlines():
            if re.match(r"\s*\$?\s*([A-Z_]+=\S+ )*(accelerate launch|torchrun|deepspeed) ", line):
                words = shlex.split(line.replace("\\ ", " "), comments=True)
                found.append((path.name, [w for w in words if w != "$"]))
    return found


def test_commands_are_found() -> None:
    places = {place for place, _ in commands()}
    assert {"gpt2_xl.yaml", "stdlib.yaml", "zero1_fp16.yaml", "pretrain.py"} <= places


@pytest.mark.parametrize(("place", "words"), commands())
def test_a_command_that_is_written_down_can_be_pasted(place: str, words: list[str]) -> None:
    assert "recipes/pretrain.py" in words, words
    at = words.index("recipes/pretrain.py")
    for word in words:
        if word.startswith(("recipes/", "accelerate_configs/", "ds_configs/")):
            assert (ROOT / word).is_file(), f"{word} in {place}"
    arguments = parse_arguments(words[at + 1 :])
    run = load_run(ROOT / arguments.run, arguments.overrides)
    if place.startswith("ddp"):
        assert run.batch.micro < 16, "DDP holds every state on every GPU"
    launcher = [word for word in words[:at] if "=" not in word.split("/")[0]]
    if launcher[0] == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        known = launch_command_parser().parse_args([*launcher[2:], "script"])
        assert known.config_file is not None
    elif launcher[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        get_args_parser().parse_args([*launcher[1:], "script"])
        assert arguments.accelerate_config or arguments.deepspeed_config
    else:
        assert arguments.deepspeed_config is not None


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_a_document_names_targets_and_files_that_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?m)^([a-z][\w-]*):", makefile))
    fenced = "\n".join(
        re.findall(r"(?ms)^```\w*\n(.*?)^```", text) + re.findall(r"`([^`\n]+)`", text)
    )
    named = set(re.findall(r"(?m)(?:^|[\s;&|])make ([a-z][\w-]*)", fenced))
    assert named <= targets, named - targets
    rooms = "recipes|accelerate_configs|ds_configs|docs|tests|benchmarks"
    rooms = rf"(?<![\w/.-])((?:{rooms})/[\w./-]+)(?![\w./*-])"  # not inside a path, no patterns
    paths = {p.rstrip(".") for p in re.findall(rooms, text)}
    absent = {p for p in paths if Path(p).stem != "X" and not (ROOT / p).exists()}
    assert not absent


def test_nothing_stands_at_the_top_but_what_the_house_allows() -> None:
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {line.split("/")[0] for line in done.stdout.splitlines()} <= set(TOP_LEVEL.split())


def test_the_tested_versions_lie_within_the_ranges_that_are_promised() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    asked = setup["options"]["install_requires"] + setup["options.extras_require"]["test"]
    pins = [
        Requirement(line)
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    pinned = {pin.name: next(iter(pin.specifier)).version for pin in pins}
    for line in asked.split("\n"):
        if line:
            wanted = Requirement(line)
            assert wanted.name in pinned, f"{wanted.name} has no tested version"
            assert wanted.specifier.contains(pinned[wanted.name]), line
