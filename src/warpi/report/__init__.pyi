from warpi.report.experiments import (
    Difference as Difference,
    Row as Row,
    RunRecord as RunRecord,
    find_runs as find_runs,
    summarize as summarize,
)
from warpi.report.page import to_html as to_html
from warpi.report.page_data import Detail as Detail, read_details as read_details
from warpi.report.paired_tests import compare as compare, rank_methods as rank_methods
from warpi.report.table import (
    to_latex as to_latex,
    to_markdown as to_markdown,
    to_rich as to_rich,
    write_json as write_json,
)
from warpi.report.write import write_report as write_report
