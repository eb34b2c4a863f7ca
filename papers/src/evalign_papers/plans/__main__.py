"""Write the configs of every table from its table.json: run after a change, and commit the result.

    python -m evalign_papers.plans            write what changed
    python -m evalign_papers.plans --check    list what would change

`evalign reproduce` reads only the configs. The report next to a changed config no longer matches it and is refused.
"""

import argparse
import itertools

from evalign.storage.atomic import write_atomically
from evalign_papers.engine.config import read_config, to_json
from evalign_papers.plans import image_plans, table_plans


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="list the configs that would change, and write none")
    check = parser.parse_args().check
    plans = [table_plans.plan(paper, table) for paper, tables in table_plans.TABLES.items() for table in tables]
    plans += [image_plans.plan_images(paper, table) for paper, tables in image_plans.TABLES.items() for table in tables]
    changed = [
        (path, config) for path, config in itertools.chain(*plans) if not path.exists() or read_config(path) != config
    ]
    for path, config in () if check else changed:
        write_atomically(path, to_json(config))
    print("\n".join(str(path) for path, _ in changed) if check else f"{len(changed)} configs written")


if __name__ == "__main__":
    main()
