"""Replacing functions of other libraries: the code of each, while `install` or a block of `accelerate` needs it.

    acquire(targets)     replaces the functions, also in modules that are imported later
    release()            restores them, when it is called as often as `acquire`

`f.__code__` is replaced, not the name `f` in a module, so that other names of the same function, imported before, run the new
code too. At every call, the new code checks whether this thread runs on jaxkern, and runs the old code if it does not, or if
the replacement leaves the call to the original.
"""

import contextlib
import importlib.abc
import importlib.util
import inspect
import sys
import threading
import types
import typing

import jax

from jaxkern._accelerate.arguments import decide
from jaxkern._core import compat, decisions, switch


class Target(typing.NamedTuple):
    """A function to replace, named `attribute` in its module.

    replacement(original, *arguments): returns NotImplemented to leave a call to the original. It has the parameters of the
        function, by the same names and in the same order, and may have more.
    """

    operation: str
    module: str
    attribute: str
    replacement: typing.Callable

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}"


class Replaced(typing.NamedTuple):
    target: Target
    function: types.FunctionType
    code: types.CodeType  # the function's own
    original: types.FunctionType  # a copy that has it


_lock = threading.RLock()
_users = 0
_targets: tuple[Target, ...] = ()
_replaced: dict[str, Replaced] = {}
_restored: dict[str, Replaced] = {}  # other threads may still be in a call of their new code


def call(name, arguments, named):
    """Runs the replacement of the function of this name, or the function: its new code calls this."""
    place = _replaced.get(name) or _restored[name]
    target, original = place.target, place.original
    if not switch.wanted(target.operation):
        return original(*arguments, **named)
    if not _on_gpu(switch.current()):
        if decisions.printed():
            _left_on(jax.default_backend(), target.operation, (*arguments, *named.values()))
        return original(*arguments, **named)
    found = target.replacement(original, *arguments, **named)
    return original(*arguments, **named) if found is NotImplemented else found


def _on_gpu(settings) -> bool:
    """Whether the program may be one for a GPU. While it is traced, JAX does not know where it will run."""
    return settings.force or settings.export or settings.session > 0 or jax.default_backend() == "gpu"


def _left_on(platform, operation, arguments):
    """Records that a call is left since the program is for a platform that has no kernels."""
    x = next((a for a in arguments if isinstance(a, jax.Array)), None)
    if x is not None:
        decide(operation, False, switch.no_kernels(platform), x)


def _new_code(function, name) -> types.CodeType:
    """Code of the same signature that calls `call`."""
    parameters, passed, named = [], [], []
    for p in inspect.signature(function).parameters.values():
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            raise TypeError(f"{function.__name__} has a parameter {p}")
        if p.kind is p.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        parameters.append(p.name if p.default is p.empty else f"{p.name}=None")  # the function has the defaults
        (named if p.kind is p.KEYWORD_ONLY else passed).append(p.name)
    source = (
        f"def {function.__name__}({', '.join(parameters)}):\n"
        f"    from jaxkern._accelerate.replace import call\n"
        f"    return call({name!r}, ({''.join(f'{n}, ' for n in passed)}), "
        f"{{{', '.join(f'{n!r}: {n}' for n in named)}}})\n"
    )
    scope: dict = {}
    exec(compile(source, "<jaxkern.accelerate>", "exec"), scope)
    return scope[function.__name__].__code__


def _replace(target: Target) -> None:
    """Replaces a function, if its module is imported and it is a plain function with the expected parameters."""
    if target.name in _replaced or target.module not in sys.modules:
        return
    function = getattr(sys.modules[target.module], target.attribute, None)
    # A wrapper, such as the one that jax.named_scope makes, holds the function in a variable of its own.
    if not inspect.isfunction(function) or function.__code__.co_freevars:
        function = getattr(function, "__wrapped__", function)
    if not inspect.isfunction(function) or function.__code__.co_freevars or not _has_known_parameters(function, target):
        compat.warn_once(f"jaxkern.accelerate: {target.name} cannot be replaced and runs unchanged")
        return
    if any(r.function is function for r in _replaced.values()):
        return  # by another name
    known = _restored.get(target.name)
    if known is None or known.function is not function:
        code = function.__code__
        original = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
        original.__kwdefaults__ = function.__kwdefaults__
        known = Replaced(target, function, code, original)
    _replaced[target.name] = known
    function.__code__ = _new_code(function, target.name)


def _has_known_parameters(function, target) -> bool:
    """Whether the replacement knows all parameters of the function. Versions of a library may differ."""
    _, *known = inspect.signature(target.replacement).parameters
    found = list(inspect.signature(function).parameters)
    return found == [name for name in known if name in found]


def _leave_kernel_bodies(module: str) -> None:
    """Leaves the bodies of Pallas kernels as they are, if this module of Pallas is imported.

    Pallas has no lowering for primitives of this library. The settings are a part of the keys of JAX's caches, so a function
    under jit that is called inside and outside a kernel has a trace for each.
    """
    if module in sys.modules and module not in _with_kernels:
        _with_kernels.add(module)
        compat.enter_in_kernel_bodies(sys.modules[module], lambda: switch.using(None))


_with_kernels: set[str] = set()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Replaces functions of a package when it is imported later."""

    def find_spec(self, name, path=None, target=None):
        wanted = [t for t in _targets if t.module == name]
        if not (wanted or name in compat.KERNEL_BODIES) or getattr(_finding, "busy", False):
            return None
        _finding.busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            _finding.busy = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            with _lock:
                if name in compat.KERNEL_BODIES:
                    _leave_kernel_bodies(name)
                for t in wanted if _users else ():
                    _replace(t)

        with contextlib.suppress(AttributeError):
            spec.loader.exec_module = exec_module
        return spec


_finding = threading.local()
_hook = _AfterImport()


def acquire(targets) -> None:
    global _users, _targets
    with _lock:
        _users, _targets = _users + 1, targets
        if _users == 1:
            sys.meta_path.insert(0, _hook)
        for target in targets:
            _replace(target)
        for module in compat.KERNEL_BODIES:
            _leave_kernel_bodies(module)


def release() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users:
            return
        sys.meta_path.remove(_hook)
        for place in _replaced.values():
            place.function.__code__ = place.code
        _restored.update(_replaced)
        _replaced.clear()
