"""The package as the modules below it see it, which cannot import it: its version and its folders."""

import importlib.metadata
import importlib.util
import pathlib

__version__ = "0.2.0"


def folders() -> list[str]:
    """`jaxkern.__path__`: the folders in which the modules and the files of the package are looked for."""
    spec = importlib.util.find_spec("jaxkern")
    assert spec is not None and spec.submodule_search_locations is not None
    return spec.submodule_search_locations


def find_installed() -> None:
    """Makes a checkout use the extension module of the installed package."""
    try:
        installed = importlib.metadata.distribution("jaxkern")
    except importlib.metadata.PackageNotFoundError:
        return
    folder = pathlib.Path(str(installed.locate_file("jaxkern")))
    if folder.is_dir() and installed.version == __version__ and str(folder) not in folders():
        folders().append(str(folder))
