"""The package as the modules below it see it, which cannot import it: its version and its folders."""

import importlib.metadata
import importlib.util
import inspect
import pathlib

__version__ = "0.2.0"
DISTRIBUTION = "jaxkern-cuda"  # the name that pip knows; on PyPI, `jaxkern` is another project


def folders() -> list[str]:
    """`jaxkern.__path__`: the folders in which the modules and the files of the package are looked for."""
    spec = importlib.util.find_spec("jaxkern")
    assert spec is not None and spec.submodule_search_locations is not None
    return spec.submodule_search_locations


def publish(module: str, *objects) -> None:
    """Names objects of private modules after the public `module` that imports them: in `help`, in `repr` and in pickles."""
    for x in objects:
        members = vars(x).values() if isinstance(x, type) else ()  # Python 3.12.3 shows where methods come from, too
        for named in (x, *(f for f in members if inspect.isfunction(f))):
            named.__module__ = module


def find_installed() -> None:
    """Makes a checkout use the extension module of the installed package."""
    try:
        installed = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return
    folder = pathlib.Path(str(installed.locate_file("jaxkern")))
    if folder.is_dir() and installed.version == __version__ and str(folder) not in folders():
        folders().append(str(folder))


def namesake() -> str:
    """What is wrong if a distribution with the name `jaxkern` lies in the folder of this package, whose files it shares; or "".

    It is another project's, from PyPI, or this project's from before it had its present name. Uninstalling or upgrading one of
    the two removes or replaces files of the other.
    """
    for folder in folders():
        for found in pathlib.Path(folder).parent.glob("jaxkern-*.dist-info"):
            return (
                f"the package {found.name.removesuffix('.dist-info')} is installed over the files of {DISTRIBUTION}, in "
                f"{found.parent}. Run `pip uninstall -y jaxkern {DISTRIBUTION}`, and install {DISTRIBUTION} again"
            )
    return ""
