"""The static pages that a workflow publishes: each link within them leads to a page, and each
anchor to a place on it."""

import importlib.util
from html.parser import HTMLParser

import pytest

from common.commands import ROOT

pytest.importorskip("markdown_it")


class Page(HTMLParser):
    """The links, pictures and anchors of an HTML file."""

    def __init__(self, path):
        super().__init__()
        self.targets = []
        self.anchors = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.targets += [values[key] for key in ("href", "src", "srcset") if key in values]
        self.anchors.add(values.get("id"))


def test_every_link_within_the_site_leads_somewhere(tmp_path):
    spec = importlib.util.spec_from_file_location("site", ROOT / ".github/site.py")
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    site.write(tmp_path)

    pages = {path: Page(path) for path in tmp_path.rglob("*.html")}
    assert {tmp_path / "index.html", tmp_path / "docs/parts.html"} <= pages.keys()
    assert tmp_path / "bench/results/answer/index.html" in pages
    lost = []
    for path, page in pages.items():
        for target in page.targets:
            if target.startswith(("http:", "https:")):
                continue
            name, _, anchor = target.partition("#")
            there = (path.parent / name).resolve() if name else path
            if not there.is_file() or (anchor and anchor not in pages[there].anchors):
                lost.append(f"{path.relative_to(tmp_path)}: {target}")
    assert not lost
    blob = f"{site.REPOSITORY}/blob/{site.COMMIT}/"
    source = [target for target in pages[tmp_path / "index.html"].targets if blob in target]
    assert all((ROOT / target.removeprefix(blob)).exists() for target in source) and source
