//! Chapters as one self-contained HTML page, without network access, scripts and fonts. The page
//! has light and dark colours, and styles for narrow screens and for printing.

use crate::chapter::{Block, Cell, Chapter, Table, Tile, Tone, Warning};
use maud::{DOCTYPE, Markup, PreEscaped, html};

const STYLE: &str = include_str!("style.css");
/// Cells with more characters than this are wrapped.
const LONG: usize = 44;
/// Tables with more columns than this have less padding.
const MANY: usize = 10;

/// Renders the page. `made_by` names the program and is in the footer.
pub fn page(chapters: &[Chapter], made_by: &str) -> String {
    let title = match chapters {
        [only] => only.title.clone(),
        [first, ..] => format!("{} and {} more", first.title, chapters.len() - 1),
        [] => "nothing".into(),
    };
    let several = chapters.len() > 1;
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                // Forbids scripts and network access, also if a name in a result had markup.
                meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:";
                meta name="generator" content=(made_by);
                title { (title) " · diskwright" }
                link rel="icon" href="data:,";
                style { (PreEscaped(STYLE)) }
            }
            body {
                @for (index, chapter) in chapters.iter().enumerate() {
                    @if index == 0 {
                        header id=(chapter.id) { h1 { (chapter.title) } (head(chapter)) }
                        @if several { (contents(chapters)) }
                        main { (body(chapter)) @for other in &chapters[1..] {
                            section id=(other.id) { h2 { (other.title) } (head(other)) (body(other)) }
                        } }
                    }
                }
                footer { (made_by) ". Point at a line, bar or cell for its exact figures; "
                    "the result itself (JSON) has them all." }
            }
        }
    }
    .into_string()
}

fn contents(chapters: &[Chapter]) -> Markup {
    html! {
        nav aria-label="Results" style="max-width:1180px;margin:0 auto;padding:0 20px" {
            ul { @for chapter in chapters { li { a href={ "#" (chapter.id) } { (if chapter.source.is_empty() { &chapter.title } else { &chapter.source }) } } } }
        }
    }
}

fn head(chapter: &Chapter) -> Markup {
    html! {
        p class="verdict" { (chapter.verdict) }
        p class="soft" { @for (tone, word) in &chapter.badges { span class={ "badge " (class(*tone)) } { (word) } } (chapter.origin()) }
        @if !chapter.warnings.is_empty() {
            ul class="warnings" aria-label="Warnings" {
                @for Warning { tone, sentence } in &chapter.warnings { li class=(class(*tone)) { (sentence) } }
            }
        }
    }
}

fn body(chapter: &Chapter) -> Markup {
    html! { @for block in &chapter.blocks { (draw(block)) } }
}

fn draw(block: &Block) -> Markup {
    html! {
        @match block {
            Block::Heading(text) => h3 { (text) },
            Block::Text(text) => p { (text) },
            Block::Tiles(tiles) => div class="tiles" { @for tile in tiles { (draw_tile(tile)) } },
            Block::Table(table) => (draw_table(table)),
            Block::Plots(plots) => div class="plots" { @for plot in plots { (plot) } },
            Block::Facts(facts) => dl class="facts" { @for (name, value) in facts { dt { (name) } dd { (value) } } },
            Block::Code { name, text, .. } => { p class="soft" { (name) } pre tabindex="0" { (text) } },
            Block::Folded { name, blocks } => details { summary { (name) } @for block in blocks { (draw(block)) } },
        }
    }
}

fn draw_tile(tile: &Tile) -> Markup {
    html! {
        div class="tile" {
            b { (figure(&tile.cell)) @if !tile.unit.is_empty() { " " small { (tile.unit) } } }
            span { (tile.name) }
        }
    }
}

fn draw_table(table: &Table) -> Markup {
    let numeric: Vec<bool> = (0..table.heads.len()).map(|column| table.is_numeric(column)).collect();
    let align = |column: usize| if numeric.get(column) == Some(&true) { "n" } else { "" };
    html! {
        div class={ "table scroll" (if table.heads.len() > MANY { " wide" } else { "" }) } tabindex="0" role="group" aria-label=(table.caption) {
            table {
                caption class="faint" style="text-align:left;padding:.45rem .75rem;white-space:normal" { (table.caption) }
                thead { tr { @for (column, head) in table.heads.iter().enumerate() { th scope="col" class=(align(column)) { (head) } } } }
                tbody {
                    @for row in &table.rows {
                        tr class=(if row.total { "total" } else { "" }) {
                            @for (column, cell) in row.cells.iter().enumerate() {
                                @if column == 0 { th scope="row" class=(align(0)) { (figure(cell)) } }
                                @else { td class={ (align(column)) " " (class(cell.tone)) (wrap(cell)) } { (figure(cell)) } }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// CSS class of a cell whose text is wrapped.
fn wrap(cell: &Cell) -> &'static str {
    if cell.text.chars().count() > LONG { " long" } else { "" }
}

/// The text of a cell. A figure is in a `data` element with its exact value.
fn figure(cell: &Cell) -> Markup {
    html! {
        @match cell.value {
            Some(value) => data value=(value) { (cell.text) },
            None => (cell.text),
        }
    }
}

fn class(tone: Tone) -> &'static str {
    match tone {
        Tone::Plain => "",
        Tone::Good => "good",
        Tone::Bad => "bad",
        Tone::Warning => "doubt",
        Tone::Faint => "faint",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chapter(title: &str) -> Chapter {
        let mut table = Table::new("Figures", &["direction", "IOPS"]);
        table.row(vec![Cell::text("<b>reads</b>"), Cell::figure(58_071.312, |value| format!("{value:.0}"))]);
        Chapter {
            id: "r1".into(),
            title: title.into(),
            source: "r.json".into(),
            subtitle: "a run".into(),
            verdict: "It did well.".into(),
            badges: vec![(Tone::Good, "complete".into())],
            warnings: vec![Warning { tone: Tone::Bad, sentence: "it was a debug build".into() }],
            blocks: vec![Block::Table(table)],
        }
    }

    #[test]
    fn the_verdict_comes_first_and_figures_have_their_exact_values() {
        let page = page(&[chapter("a.json")], "diskwright 0.1.0");
        let at = |text: &str| page.find(text).unwrap_or_else(|| panic!("{text} is not in {page}"));
        assert!(at("It did well.") < at("it was a debug build") && at("it was a debug build") < at("<table>"));
        assert!(page.contains("<data value=\"58071.312\">58071</data>"), "{page}");
    }

    #[test]
    fn a_page_loads_nothing_and_has_no_script() {
        let page = page(&[chapter("<script>alert(1)</script>"), chapter("b")], "diskwright");
        assert!(!page.contains("<script") && !page.contains("<b>reads"), "{page}");
        // The SVG namespace is the only URL.
        assert!(!page.replace("http://www.w3.org/2000/svg", "").contains("http://"), "{page}");
        assert!(!page.contains("https://") && !page.contains("url("), "{page}");
    }
}
