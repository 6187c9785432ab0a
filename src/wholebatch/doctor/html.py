"""The report as one page: findings first, then pictures; nothing is loaded from anywhere."""

from __future__ import annotations

from html import escape

from wholebatch.doctor import drawing
from wholebatch.doctor.report import Report, stands
from wholebatch.verify.finding import Finding

STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --soft: #5b6b7a; --paper: #fbfbf9; --line: #d9dee3; --blue: #3b7dd8;
  --red: #cf4a3c; --green: #2f8f5b; --amber: #d99a1c }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6ebf0; --soft: #9aa9b7; --paper: #161c22; --line: #323d48; --blue: #5b9bf0; --red: #e8695b }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 900px;
  margin: 2.5rem auto; padding: 0 1.2rem }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem }
p { margin: .3rem 0 } .soft { color: var(--soft) }
.finding { border-left: 4px solid var(--red); padding: .1rem 1rem; margin: 1.2rem 0 }
.clean { border-left: 4px solid var(--green); padding: .3rem 1rem; margin: 1.2rem 0 }
.finding h2 { margin: .3rem 0 }
pre { background: color-mix(in srgb, var(--line) 40%, transparent); padding: .5rem .8rem; overflow-x: auto;
  border-radius: 4px; font-size: .85rem; margin: .5rem 0 }
.out { color: var(--red) } .into { color: var(--green) } code { font-size: .9em }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif }
text { fill: var(--ink) } .label { fill: var(--soft) } .inside { fill: #fff; font-size: 11px }
.micro-batch { fill: var(--blue) } .lost { fill: var(--line); stroke: var(--red); stroke-dasharray: 3 2 }
.error { fill: var(--red) } .clip { fill: var(--red) } .rightclip { fill: var(--green) } .epoch { fill: var(--amber) }
"""


def page(report: Report) -> str:
    """Return the whole page as text."""
    findings = "".join(one(number, finding) for number, finding in enumerate(report.findings, 1))
    parts = [
        f"<h1>{escape(report.findings[0].rule if report.findings else 'No fault seen')}</h1>",
        f'<p class="soft">{escape(report.heading())}</p>',
        findings or f'<div class="clean"><p>{escape(report.verdict())}</p></div>',
        *(f"<p>{escape(note)}</p>" for note in report.notes),
        *pictures(report),
    ]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>wholebatch doctor</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def one(number: int, finding: Finding) -> str:
    """Return one finding."""
    out = f'<span class="out">- {escape(finding.change.out)}</span>\n' if stands(finding) else ""
    place = f' <span class="soft">{escape(str(finding.site))}</span>' if finding.site is not None else ""
    why = f'<p class="soft">{escape(finding.why)}</p>' if finding.why else ""
    return (
        f'<div class="finding"><h2>{number}. {escape(finding.rule)}{place}</h2>'
        f"<p>{escape(finding.what)}: <strong>{escape(finding.amount)}</strong></p>"
        f"<pre>{out}"
        f'<span class="into">+ {escape(finding.change.into)}</span></pre>{why}</div>'
    )


def pictures(report: Report) -> list[str]:
    """Return the pictures that there is something to draw for."""
    if not report.looked:
        return []
    parts = [
        "<h2>The micro-batches of each step</h2>",
        '<p class="soft">As wide as their items. Dashed: thrown away. Red line: a clip inside the window.</p>',
        drawing.windows(report.stories),
        "<h2>Items that each step learned from</h2>",
        drawing.effective_batch(report.stories),
    ]
    if report.measurement is not None:
        parts += ["<h2>Error by parameter, against the reference</h2>"]
        parts += [drawing.parameter_errors(report.measurement.by_parameter)]
    return parts
