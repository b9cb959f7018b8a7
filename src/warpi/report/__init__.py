"""Compare runs: tables, curves and an HTML page, from run folders alone. Nothing here loads torch at import."""

from warpi.utils.lazy import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "warpi.report.experiments": ("Difference", "Row", "RunRecord", "find_runs", "summarize"),
        "warpi.report.page": ("to_html",),
        "warpi.report.page_data": ("Detail", "read_details"),
        "warpi.report.paired": ("compare",),
        "warpi.report.table": ("to_latex", "to_markdown", "to_rich", "write_json"),
        "warpi.report.write": ("write_report",),
    },
)
