"""Import rules of whole modules; those between folders stand in pyproject.toml."""

from graphlib import TopologicalSorter

import grimp


def test_no_module_imports_itself_through_others() -> None:
    """Also not within functions, for types alone, or as a package's `__init__` and its modules.

    import-linter's rule compares the children of a package and leaves the package itself out.
    """
    graph = grimp.build_graph("bigplan", cache_dir=None)
    assert "bigplan" in graph.modules
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(imported).prepare()  # CycleError lists the modules of a cycle
