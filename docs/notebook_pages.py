"""Pages for docs/notebooks, made by mkdocs: each notebook is executed, and a page of the site shows its cells and their output.

A cell that fails ends the build. The notebooks are kept without output; the site also has them as files, to download.
"""

import base64
import concurrent.futures
import pathlib

import nbclient
import nbformat
from mkdocs.structure.files import File

FOLDER = pathlib.Path(__file__).resolve().parent / "notebooks"
HEAD = """!!! note ""
    This page is a notebook, which ran when the site was built. [Download it]({name}.ipynb){{ download }}.
"""


def on_files(files, config):
    paths = sorted(FOLDER.glob("*.ipynb"))
    with concurrent.futures.ThreadPoolExecutor() as pool:  # a process runs each
        pages = list(pool.map(page, paths))
    for path, (text, pictures) in zip(paths, pages):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def page(path: pathlib.Path) -> tuple[str, dict[str, bytes]]:
    """(the Markdown of an executed notebook, {name: PNG} of its pictures)."""
    notebook = nbformat.read(path, as_version=4)
    quiet = ["--IPKernelApp.log_level=ERROR"]
    nbclient.NotebookClient(notebook, extra_arguments=quiet).execute(cwd=str(path.parent))
    parts, pictures = [], {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        printed = "".join(o.text for o in cell.outputs if o.output_type == "stream")
        if printed:
            parts.append(f"```{{ .text .output }}\n{printed.rstrip()}\n```")
        for output in cell.outputs:
            if "image/png" in output.get("data", {}):
                name = f"{path.stem}-{len(pictures)}.png"
                pictures[name] = base64.b64decode(output.data["image/png"])
                parts.append(f"![{path.stem}, picture {len(pictures)}]({name}){{ .figure }}")
    parts.insert(1, HEAD.format(name=path.stem))
    return "\n\n".join(parts), pictures
