"""Style sheet of a report: one or two columns, light or dark, with texts in pictures that a phone can show."""

from typing import Final

# Colors of lines have a contrast of at least 3 to the paper, and distances (CIE 1976) of at least 16 from each other,
# as readers without red, green or blue cones see them, too. Each line also has markers of its own shape. Texts in a
# picture shrink with it; a narrow picture has larger ones, and every other tick.
STYLE: Final = """
:root { color-scheme: light dark; --paper: #fff; --panel: #f4f6f8; --ink: #1a1f26; --muted: #56606b; --grid: #dfe4e9;
  --line: #b9c1ca; --c0: #0064a8; --c1: #7f3a10; --c2: #00ad0e; --c3: #e37372; --c4: #951a3f; --c5: #7b8cfa;
  --c6: #3233a8; --c7: #5c6670; --kept: #3a7fb8; --again: #d1500a; --restart: #8a5fc7 }
@media (prefers-color-scheme: dark) {
  :root { --paper: #12161b; --panel: #1b2128; --ink: #e8ebee; --muted: #a3adb8; --grid: #2b333c; --line: #4a5561;
    --c0: #5cb3f0; --c1: #f0ca90; --c2: #606c00; --c3: #9a466d; --c4: #6c48da; --c5: #e5992b; --c6: #519159;
    --c7: #a3adb8; --kept: #5c9fd6; --again: #ff8f4a; --restart: #b79af0 }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 104rem; padding: 1rem clamp(0.75rem, 3vw, 2.5rem) 4rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif }
h1 { margin: 0.5rem 0; font-size: clamp(1.4rem, 4vw, 2rem); line-height: 1.2; overflow-wrap: anywhere }
h2 { margin: 2.5rem 0 0.75rem; padding-top: 0.75rem; border-top: 1px solid var(--line); font-size: 1.3rem }
h3 { margin: 1.5rem 0 0.5rem; font-size: 1.05rem; overflow-wrap: anywhere }
p { max-width: 75ch; overflow-wrap: anywhere }
a { color: var(--c0) }
nav ul { display: flex; flex-wrap: wrap; gap: 0.25rem 1.25rem; margin: 0; padding: 0; list-style: none }
.note { color: var(--muted) }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: 0.6rem; margin: 0 }
.facts div { padding: 0.6rem 0.8rem; border-radius: 0.5rem; background: var(--panel) }
.facts dt { color: var(--muted); font-size: 0.85rem }
.facts dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
.facts small { display: block; color: var(--muted); font-size: 0.8rem }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 32rem), 1fr)); gap: 1.5rem 2rem }
.beside > div { min-width: 0 }
.small { grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)) }
figure { margin: 0; max-width: 58rem; min-width: 0; container-type: inline-size }
figcaption { margin-bottom: 0.35rem; font-weight: 600; overflow-wrap: anywhere }
.picture { display: block; width: 100%; height: auto }
.picture text { fill: var(--muted); font: 13px system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif }
.right { text-anchor: end } .middle { text-anchor: middle }
@container (max-width: 40rem) { .picture text { font-size: 16px } }
@container (max-width: 29rem) { .picture text { font-size: 20px } .picture .sparse { display: none } }
.rule { fill: none; stroke: var(--grid) }
.axis { fill: none; stroke: var(--line) }
.restart { fill: none; stroke: var(--restart); stroke-dasharray: 2 4; stroke-width: 1.5 }
.stroke { fill: none; stroke-width: 1.8; stroke-linecap: round; stroke-linejoin: round }
.wanted { stroke-width: 1.6; stroke-dasharray: 5 5 }
.band { opacity: 0.28 }
.bar { opacity: 0.9 }
.marker { stroke: var(--paper); stroke-width: 0.8 }
.span.kept { fill: var(--kept) }
.span.again { fill: none; stroke: var(--again); stroke-width: 2; stroke-dasharray: 4 2 }
.span.open { fill: var(--line) }
.s0 { stroke: var(--c0) } .s1 { stroke: var(--c1) } .s2 { stroke: var(--c2) } .s3 { stroke: var(--c3) }
.s4 { stroke: var(--c4) } .s5 { stroke: var(--c5) } .s6 { stroke: var(--c6) } .s7 { stroke: var(--c7) }
.f0 { fill: var(--c0) } .f1 { fill: var(--c1) } .f2 { fill: var(--c2) } .f3 { fill: var(--c3) }
.f4 { fill: var(--c4) } .f5 { fill: var(--c5) } .f6 { fill: var(--c6) } .f7 { fill: var(--c7) }
.legend { display: flex; flex-wrap: wrap; gap: 0.15rem 1rem; margin: 0.25rem 0 0; padding: 0; list-style: none;
  font-size: 0.9rem }
.legend li { overflow-wrap: anywhere }
.swatch { width: 1.75rem; height: 0.875rem; vertical-align: -0.05rem }
.table { margin: 0.9rem 0 }
.scroll { max-width: 100%; overflow-x: auto }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums }
.caption { margin: 0 0 0.15rem; color: var(--muted); font-size: 0.9rem }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid var(--grid); text-align: left; vertical-align: top }
td, th[scope="col"] { white-space: nowrap }
th[scope="row"] { max-width: 14rem; overflow-wrap: break-word; white-space: normal }
th.number, td.number { text-align: right }
summary { cursor: pointer; color: var(--c0) }
@media print { details > * { display: block } }
"""
