"""How nbgrader runs this course: `nbgrader generate_assignment lab01`, `autograde`, `generate_feedback`, from here.

`ftlab labs`, `ftlab collect` and `ftlab grade` read this same file.
"""

from ftlab.config import own_programs_first

own_programs_first()
c = get_config()  # noqa: F821  (nbgrader puts it there)

c.CourseDirectory.course_id = "ftlab"
c.CourseDirectory.source_directory = "solutions"  # authored: with solutions, hidden tests and mark schemes
c.CourseDirectory.release_directory = "labs"  # generated: what students get
c.CourseDirectory.ignore = [".ipynb_checkpoints", "*.pyc", "__pycache__", "runs", "checkpoints", "*.events.jsonl",
                            "report*.html"]

# Importing torch on a busy machine takes longer than nbgrader's 30 s, and a check has deadlines of its own.
c.ExecutePreprocessor.timeout = 600
c.ExecutePreprocessor.iopub_timeout = 60
c.Execute.timeout = 600
c.Execute.iopub_timeout = 60

c.ClearSolutions.code_stub = {"python": "# YOUR CODE HERE\nraise NotImplementedError()"}
c.ClearSolutions.text_stub = "*Your answer here.*"
c.ClearMarkScheme.enforce_metadata = False  # ours stand in manual cells, not only in task cells

# What `ftlab submit` puts missing cells back from.
c.GenerateAssignment.post_convert_hook = "ftlab.grading.course.record.keep"

# Student's code runs in a sandbox, and only there; graded cells are restored first, whatever stands in a submission.
c.Autograde.sanitize_preprocessors = [
    "nbgrader.preprocessors.ClearOutput",
    "ftlab.grading.marking.preprocessors.Restore",
    "nbgrader.preprocessors.DeduplicateIds",
    "nbgrader.preprocessors.OverwriteKernelspec",
    "nbgrader.preprocessors.OverwriteCells",
    "nbgrader.preprocessors.CheckCellMetadata",
]
c.Autograde.autograde_preprocessors = [
    "ftlab.grading.marking.preprocessors.SandboxedExecute",
    "nbgrader.preprocessors.LimitOutput",
    "nbgrader.preprocessors.SaveAutoGrades",
    "nbgrader.preprocessors.AssignLatePenalties",
    "nbgrader.preprocessors.CheckCellMetadata",
]
c.HTMLExporter.sanitize_html = True  # what students wrote is shown to others, and must not run there
c.HTMLExporter.filters = {"markdown2html": "ftlab.grading.course.markup.markdown2html"}  # for nbgrader's templates
c.HTMLExporter.preprocessors = ["ftlab.grading.course.mark_scheme.ShowMarkScheme"]  # in the formgrader only

# Feedback tells how a cell went, not what was hidden in it.
c.GenerateFeedback.preprocessors = [
    "nbgrader.preprocessors.GetGrades",
    "ftlab.grading.course.feedback.HideTests",
    "ftlab.grading.course.feedback.ShortTracebacks",
    "nbconvert.preprocessors.CSSHTMLHeaderPreprocessor",
]
