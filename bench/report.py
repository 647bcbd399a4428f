"""Write the report of sweeps from their stored rows: python bench/report.py OUT [OUT2 ...]"""

if not __package__:
    import repo_root  # noqa: F401 (puts the repo's root on the path)

from common import early

if __name__ == "__main__":
    early.need(*early.ABLATE)

from bench.ablation.report import main
from common.errors import run

if __name__ == "__main__":
    run(main)
