"""Pages of the site for files of the repository that lie outside of docs/ and to which a page links; tables of pages.

Links between files are written as GitHub reads them, such as `../examples/moe.py`. The site has a page
`source/examples/moe.py/` with the text of that file, and the link leads to it.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import diagrams
import tables

ROOT: Final = Path(__file__).parents[1]
_LINK: Final = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(\))")
_TABLE: Final = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)
_CODE: Final = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# Pages without sidebars, for wide tables. Front matter of a page would be text on GitHub.
_WIDE: Final = ("index.md", "combinations.md", "waits.md", "lightning_names.md", "private_apis.md")
# Where a name may continue on the next line: after punctuation, except within numbers, and before a capital letter.
_PIECE: Final = re.compile(r"(?<=[^\W\d][._/(=,:*])(?=[\w\"'&])|(?<=[a-z0-9])(?=[A-Z])")
_NAME: Final = re.compile(r"(<pre.*?</pre>)|(<(code|span|td)(?: [^>]*)?>)([^<>]{9,})(?=</\3>)", re.DOTALL)
_LANGUAGES: Final = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "sh"}


def linked_file(path: str, link: str) -> str | None:
    """Return the path in the repository of a link's target; None without a file there.

    Args:
        path: of the page in the repository.
        link: as the page has it.
    """
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if (ROOT / found / "README.md").is_file():
        found = posixpath.join(found, "README.md")
    return found if (ROOT / found).is_file() else None


def address(path: str) -> str:
    """Return where the site has a file of the repository, from the site's root.

    >>> address("docs/design.md"), address("examples/moe.py"), address("README.md")
    ('design.md', 'source/examples/moe.py.md', 'source/README.md')
    """
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def outside(text: str, path: str) -> Iterator[str]:
    """Yield the files outside of docs/ to which a page links.

    Args:
        text: of the page.
        path: of the page in the repository.
    """
    for _, link, _, _ in _LINK.findall(_CODE.sub("", text)):
        found = linked_file(path, link)
        if found is not None and not found.startswith("docs/"):
            yield found


def content(path: str) -> str:
    """Return the page of a file outside of docs/.

    Args:
        path: of the file in the repository.
    """
    text = (ROOT / path).read_text()
    if path.endswith(".md"):
        return with_links(text, path)
    return f"# {path}\n\n````{_LANGUAGES.get(Path(path).suffix, 'text')}\n{text}````\n"


def with_links(text: str, path: str) -> str:
    """Return a page whose links lead to the pages of the site.

    Args:
        text: of the page.
        path: of the page in the repository.
    """

    def changed(match: re.Match[str]) -> str:
        found = linked_file(path, match[2])
        if found is None or (path.startswith("docs/") and found.startswith("docs/")):
            return match[0]  # MkDocs checks it
        link = posixpath.relpath(address(found), posixpath.dirname(address(path)) or ".")
        return f"{match[1]}{link}{match[3] or ''}{match[4]}"

    return _LINK.sub(changed, text)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files to which pages link, and those to which these link."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(waiting)
    for path in waiting:  # grows
        text = (ROOT / path).read_text() if path.endswith(".md") else ""
        for found in outside(text, path):
            if found not in seen:
                seen.add(found)
                waiting.append(found)
                files.append(File.generated(config, address(found), content=content(found)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links of pages in docs lead to the added pages; insert tables, draw diagrams, and set the layout."""
    if page.file.generated_by:
        page.meta["search"] = {"boost": 0.3}  # guides first
        return markdown
    if page.file.src_uri in _WIDE:
        page.meta["hide"] = ["navigation", "toc"]
    markdown = _TABLE.sub(lambda match: str(getattr(tables, match[1])()), markdown)
    markdown = diagrams.FENCE.sub(lambda match: diagrams.drawn(match[1], match[2]), markdown)
    return with_links(markdown, f"docs/{page.file.src_uri}")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let long names in code and in headings of the reference continue on the next line between their words."""
    return _NAME.sub(with_breaks, html)


def with_breaks(match: re.Match[str]) -> str:
    """Return an element with `<wbr>` between the words of its text; unchanged if it is a block of code or prose.

    >>> with_breaks(_NAME.search("<code>strategy=ddp_find_unused</code>"))
    '<code>strategy=<wbr>ddp_<wbr>find_<wbr>unused'
    >>> with_breaks(_NAME.search("<td>0.90 (0.80 to 1.06)</td>"))
    '<td>0.90 (0.80 to 1.06)'
    """
    block, tag, kind, text = match.groups()
    if block or (kind == "span" and "doc-object-name" not in tag):
        return match[0]
    return tag + _PIECE.sub("<wbr>", text)
