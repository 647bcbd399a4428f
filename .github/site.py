"""
Write the Markdown pages of this repo and the page of the answer as static pages:

    python .github/site.py OUT

A link to a file that is no page leads to the repository. The workflow pages.yml publishes OUT.
"""

import html
import os
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parent.parent
SERVER = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
REPOSITORY = f"{SERVER}/{os.environ.get('GITHUB_REPOSITORY', 'OWNER/nanoparts')}"
COMMIT = os.environ.get("GITHUB_SHA", "HEAD")
ANSWER = "bench/results/answer/index"  # written by bench/answer.py in both forms
FORGE = re.compile(r"\.\./\.\./(actions|deployments)/")  # in README: pages of the repository
STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 1rem; max-width: 62rem; overflow-wrap: break-word; }
body { font: 16px/1.55 system-ui, sans-serif; }
table { display: block; overflow-x: auto; border-collapse: collapse; font-size: .9rem; }
th, td { padding: .3rem .5rem; text-align: left; vertical-align: top; border: 1px solid #8885; }
h1, h2, h3 { line-height: 1.25; }
pre { overflow-x: auto; padding: .6rem; background: #8882; border-radius: 4px; }
code { font-size: .9em; }
img { max-width: 100%; height: auto; }
"""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<nav>
<a href="{home}">nanoparts</a> · <a href="{answer}">the answer</a> · <a href="{source}">source</a>
</nav>
{body}
</body>
</html>
"""


def tracked():
    """The paths of all files of the repo, from its root."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    return listed.stdout.splitlines()


def page_of(path):
    """The place of a Markdown file's page in the site: README.md is the index of its folder."""
    path = PurePosixPath(path)
    return str(path.with_name("index.html" if path.name == "README.md" else f"{path.stem}.html"))


def anchor_of(heading):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def address(target, page, files):
    """The address of a link or picture of a page: within the site if its target is there, else in
    the repository. page: the path of its Markdown file."""
    if re.match(r"[a-z]+:|#", target):
        return target
    if FORGE.match(target):
        return f"{REPOSITORY}/{target.removeprefix('../../')}"
    path, mark, anchor = target.partition("#")
    folder = str(PurePosixPath(page).parent)
    path = normpath(f"{folder}/{path}")
    if path.endswith(".png"):
        return target
    if path.endswith(".md") and path in files:
        return relpath(page_of(path), folder) + mark + anchor
    return f"{REPOSITORY}/blob/{COMMIT}/{path}{mark}{anchor}"


def render(page, files):
    """The HTML of a Markdown file."""
    markdown = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    tokens = markdown.parse((ROOT / page).read_text(encoding="utf-8"))
    title = None
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open":
            words = "".join(part.content for part in following.children)
            token.attrSet("id", anchor_of(words))
            title = title or words
        for part in token.children or []:
            for key in part.attrs.keys() & {"href", "src"}:
                part.attrSet(key, address(part.attrs[key], page, files))
    folder = str(PurePosixPath(page).parent)
    return PAGE.format(
        title=html.escape(title or page),
        style=STYLE,
        home=relpath("index.html", folder),
        answer=relpath(f"{ANSWER}.html", folder),
        source=f"{REPOSITORY}/blob/{COMMIT}/{page}",
        body=markdown.renderer.render(tokens, markdown.options, {}),
    )


def answer_page(files):
    """The page of the answer, with the links of the site."""
    text = (ROOT / f"{ANSWER}.html").read_text(encoding="utf-8")

    def link(match):
        return f'href="{address(match[1], f"{ANSWER}.md", files)}"'

    return re.sub(r'href="([^"]+)"', link, text)


def write(out):
    """Write the site into a folder."""
    files = tracked()
    for path in files:
        target = out / path
        if path.startswith("."):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".png"):
            target.write_bytes((ROOT / path).read_bytes())
        elif path == f"{ANSWER}.html":
            target.write_text(answer_page(files), encoding="utf-8")
        elif path.endswith(".md") and path != f"{ANSWER}.md":
            (out / page_of(path)).write_text(render(path, files), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
