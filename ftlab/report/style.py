"""The style sheet of cards and pages: one root class, no ids, no scripts, no network, both themes.

`.ftlab` carries the theme's variables; `.ftlab-card` is a sheet of paper, and everything else hangs under it, so a card
leaves the page around it alone. Each rule names both, which beats what JupyterLab says of tables and lists. In a narrow
place tables turn into lists (`data-name` names a cell there), or let their rows wrap.
"""

from __future__ import annotations

from ftlab.report.frame import FRAME_CSS
from ftlab.report.theme import FONT, MONO, colour, theme_css


def card_css() -> str:
    """For a card in a notebook, or on a page."""
    return theme_css() + FRAME_CSS + _CARD


def page_css() -> str:
    """For a file of its own."""
    return f"{theme_css('body')}body{{margin:0;padding:clamp(6px,2vw,24px);background:{colour('page')}}}{card_css()}"


_CARD = f"""
.ftlab{{container-type:inline-size}}
.ftlab .ftlab-card{{box-sizing:border-box;max-width:1018px;margin:8px auto 20px;padding:clamp(12px,3.2cqw,32px);
 background:{colour("paper")};color:{colour("ink")};border:1px solid {colour("hair")};border-radius:8px;
 font:14px/1.5 {FONT}}}
.ftlab .ftlab-card *{{box-sizing:border-box}}
.ftlab .ftlab-card header{{display:flex;align-items:center;gap:4px 12px;flex-wrap:wrap}}
.ftlab .ftlab-card header h2{{margin:0;padding:0;font-size:22px;font-weight:650;line-height:1.2;color:inherit;
 letter-spacing:-.01em}}
.ftlab .ftlab-card h3{{margin:28px 0 8px;padding:0;font-size:14px;font-weight:650;line-height:1.4;color:inherit}}
.ftlab .ftlab-card p,.ftlab .ftlab-card ul,.ftlab .ftlab-card ol{{color:inherit}}
.ftlab .ftlab-card .badge{{display:inline-block;padding:2px 10px;border-radius:99px;font-size:12px;font-weight:650;
 white-space:nowrap;background:{colour("plain")};color:{colour("plain-ink")}}}
.ftlab .ftlab-card .good{{background:{colour("good")};color:{colour("good-ink")}}}
.ftlab .ftlab-card .fair{{background:{colour("fair")};color:{colour("fair-ink")}}}
.ftlab .ftlab-card .bad{{background:{colour("bad")};color:{colour("bad-ink")}}}
.ftlab .ftlab-card .soft{{color:{colour("soft")};font-size:13px}}
.ftlab .ftlab-card p.soft{{margin:4px 0 0}}
.ftlab .ftlab-card .failed{{margin:16px 0 0;padding:10px 16px;border-left:3px solid {colour("red")};border-radius:3px}}
.ftlab .ftlab-card .failed ul{{margin:4px 0 0;padding-left:20px}}
.ftlab .ftlab-card dl{{display:grid;grid-template-columns:repeat(auto-fit,minmax(118px,1fr));gap:16px 20px;
 margin:20px 0 0;
 padding:18px 0;border-top:1px solid {colour("hair")};border-bottom:1px solid {colour("hair")}}}
.ftlab .ftlab-card dl>div{{display:flex;flex-direction:column;min-width:0}}
.ftlab .ftlab-card dd{{margin:0;font-size:19px;font-weight:600;line-height:1.25;font-variant-numeric:tabular-nums;
 overflow-wrap:anywhere}}
.ftlab .ftlab-card dt{{float:none;display:block;width:auto;margin:0;font-size:12px;font-weight:400;
 color:{colour("soft")}}}
.ftlab .ftlab-card details{{margin:16px 0 0}}
.ftlab .ftlab-card summary{{cursor:pointer;font-weight:650}}
.ftlab .ftlab-card table{{display:table;table-layout:auto;width:100%;margin:12px 0 0;border:0;
 border-collapse:collapse;font-size:13px;background:none;color:inherit;font-variant-numeric:tabular-nums}}
.ftlab .ftlab-card tr,.ftlab .ftlab-card table tbody tr:nth-child(n),.ftlab .ftlab-card table tbody tr:hover{{
 background:none}}
.ftlab .ftlab-card th,.ftlab .ftlab-card td{{padding:6px 14px 6px 0;border:0;border-bottom:1px solid {colour("hair")};
 text-align:left;
 vertical-align:middle;max-width:none;color:inherit;white-space:nowrap}}
.ftlab .ftlab-card th{{font-size:12px;font-weight:400;color:{colour("soft")}}}
.ftlab .ftlab-card .numbers th,.ftlab .ftlab-card .numbers td{{text-align:right;white-space:normal}}
.ftlab .ftlab-card .injections{{list-style:none;margin:0;padding:0}}
.ftlab .ftlab-card .injections li{{margin:0;padding:8px 0;border-bottom:1px solid {colour("hair")}}}
.ftlab .ftlab-card .injections p{{margin:0;display:flex;flex-wrap:wrap;gap:0 18px}}
.ftlab .ftlab-card .injections p+p{{margin-top:4px;gap:4px 6px}}
.ftlab .ftlab-card code{{padding:1px 5px;border-radius:3px;background:{colour("chip")};color:{colour("ink")};
 font-size:12px;
 font-family:{MONO};overflow-wrap:anywhere;white-space:pre-wrap}}
.ftlab .ftlab-card pre{{margin:0;font:12px/1.5 {MONO};color:inherit;background:none;white-space:pre-wrap;
 overflow-wrap:anywhere}}
.ftlab .ftlab-card li,.ftlab .ftlab-card p{{overflow-wrap:anywhere}}
.ftlab .ftlab-card a{{color:{colour("link")}}}
.ftlab .ftlab-card .dead,.ftlab .ftlab-card .died{{color:{colour("red")};font-weight:600}}
.ftlab .ftlab-card .alive{{color:{colour("green")};font-weight:600}}
.ftlab .ftlab-card .suspect{{color:{colour("amber")};font-weight:600}}
.ftlab .ftlab-card.small{{max-width:640px;margin:4px 0;padding:12px 16px}}
.ftlab .ftlab-card.green{{border-left:4px solid {colour("green")}}}
.ftlab .ftlab-card.red{{border-left:4px solid {colour("red")}}}
@container (max-width:700px){{
.ftlab .ftlab-card table.folds thead{{display:none}}
.ftlab .ftlab-card table.folds,.ftlab .ftlab-card table.folds tbody{{display:block}}
.ftlab .ftlab-card table.folds tr{{display:grid;grid-template-columns:repeat(auto-fill,minmax(140px,1fr));gap:4px 12px;
 padding:8px 0;border-bottom:1px solid {colour("hair")}}}
.ftlab .ftlab-card table.folds td{{display:block;padding:0;border:0;text-align:left;white-space:normal}}
.ftlab .ftlab-card table.folds td::before{{content:attr(data-name);display:block;font-size:11px;color:{colour("soft")}}}
}}
@container (max-width:420px){{
.ftlab .ftlab-card table.wraps thead{{display:none}}
.ftlab .ftlab-card table.wraps,.ftlab .ftlab-card table.wraps tbody{{display:block}}
.ftlab .ftlab-card table.wraps tr{{display:flex;flex-wrap:wrap;gap:0 14px;padding:6px 0;
 border-bottom:1px solid {colour("hair")}}}
.ftlab .ftlab-card table.wraps td{{display:block;padding:0;border:0}}
.ftlab .ftlab-card table.wraps td::before{{content:attr(data-name);color:{colour("soft")}}}
}}
"""
