//! Plots as inline SVG, without a plotting library. Colours are those of the page, light and dark.
//!
//! ```text
//!   figures ──▶ LineChart, BarChart, HeatMap ──▶ <figure>
//!                                                  <figcaption/>
//!                                                  <svg role="img"><title/><desc/>...</svg>
//!                                                </figure>
//! ```
//!
//! Three rules hold for each plot. `title` and `desc` describe it in words for screen readers.
//! Colour is never the only difference: lines also differ in dash and marker, and cells of a heat
//! map contain their figure. Every mark has a tooltip with its exact figures (a `title` element
//! inside it).
//!
//! Colours are CSS variables (`--s0` to `--s7`) of the page's style sheet. The palette is based on
//! that of Okabe and Ito, which is safe for the common colour vision deficiencies.

mod bars;
mod chart;
mod heat;
mod scale;

pub use bars::{Bar, BarChart, Part};
pub use chart::{Axis, Band, LineChart, Mark, Point, Rule, Series};
pub use heat::HeatMap;
pub use scale::{Scale, downsample};

use maud::{Markup, html};

/// Number of colours and dashes. Further series repeat them with other markers.
pub(super) const STYLES: usize = 8;

/// Estimated mean width of a character of the plots' 12-pixel sans-serif, in pixels, rounded up.
const CHARACTER: f64 = 6.7;

/// Estimated width of `text` in pixels.
fn width_of(text: &str) -> f64 {
    text.chars().count() as f64 * CHARACTER
}

/// Formats a coordinate in tenths of a pixel.
fn px(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

/// The marker of a style at a point: circle, square, triangle or diamond, filled or hollow.
fn marker(style: usize, x: f64, y: f64, size: f64) -> Markup {
    let hollow = if (style / 4) % 2 == 1 { "marker hollow" } else { "marker" };
    let polygon = |corners: &[(f64, f64)]| {
        corners
            .iter()
            .map(|(dx, dy)| format!("{},{}", px(x + dx * size), px(y + dy * size)))
            .collect::<Vec<_>>()
            .join(" ")
    };
    match style % 4 {
        0 => html! { circle class=(hollow) cx=(px(x)) cy=(px(y)) r=(px(size)) {} },
        1 => {
            html! { rect class=(hollow) x=(px(x - size * 0.9)) y=(px(y - size * 0.9)) width=(px(size * 1.8)) height=(px(size * 1.8)) {} }
        }
        2 => html! { polygon class=(hollow) points=(polygon(&[(0.0, -1.2), (1.1, 0.9), (-1.1, 0.9)])) {} },
        _ => html! { polygon class=(hollow) points=(polygon(&[(0.0, -1.3), (1.3, 0.0), (0.0, 1.3), (-1.3, 0.0)])) {} },
    }
}

/// The figure element around a plot.
struct Frame<'a> {
    id: &'a str,
    title: &'a str,
    description: &'a str,
    width: f64,
    height: f64,
}

impl Frame<'_> {
    fn wrap(&self, inside: &Markup) -> Markup {
        let (title_id, text_id) = (format!("{}-t", self.id), format!("{}-d", self.id));
        html! {
            figure class="plot" id=(self.id) {
                figcaption { (self.title) }
                div class="scroll" tabindex="0" role="group" aria-label=(self.title) {
                    svg role="img" aria-labelledby={ (title_id) " " (text_id) } viewBox={ "0 0 " (px(self.width)) " " (px(self.height)) }
                        xmlns="http://www.w3.org/2000/svg" {
                        title id=(title_id) { (self.title) }
                        desc id=(text_id) { (self.description) }
                        (inside)
                    }
                }
            }
        }
    }
}

/// Converts a plot that [`LineChart`], [`BarChart`] or [`HeatMap`] rendered into an SVG file, with
/// its title and the page's colours. `made_by` becomes a comment. `None` when `figure` has no SVG.
pub fn standalone(figure: &Markup, made_by: &str) -> Option<String> {
    let text = &figure.0;
    let (start, end) = (text.find("<svg")?, text.find("</svg>")?);
    let (head, inside) = text[start..end].split_once('>')?;
    let caption = text.split_once("<figcaption>")?.1.split_once("</figcaption>")?.0;
    let places: Vec<f64> =
        head.split_once("viewBox=\"")?.1.split_once('"')?.0.split(' ').filter_map(|place| place.parse().ok()).collect();
    let [_, _, width, height] = places[..] else { return None };
    let made_by = made_by.replace("--", "");
    Some(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" width=\"{width}\" height=\"{0}\" viewBox=\"0 -{TITLE_HEIGHT} {width} {0}\">\n\
         <!-- {made_by} -->\n<style>{STYLE}</style>\n\
         <rect x=\"0\" y=\"-{TITLE_HEIGHT}\" width=\"{width}\" height=\"{0}\" style=\"fill:var(--card)\"/>\n\
         <text x=\"12\" y=\"-10\" style=\"font-weight:600;font-size:14px\">{caption}</text>\n{inside}</svg>\n",
        height + TITLE_HEIGHT,
    ))
}

/// Height of the title above a standalone plot, in pixels.
const TITLE_HEIGHT: f64 = 32.0;
/// The page's style sheet, and the font of a standalone plot.
const STYLE: &str = concat!(
    include_str!("../style.css"),
    "svg{font:12px system-ui,-apple-system,\"Segoe UI\",Roboto,\"Noto Sans\",\"Liberation Sans\",sans-serif}"
);

/// One entry of a legend.
struct LegendEntry<'a> {
    name: &'a str,
    style: usize,
    line: bool,
    dots: bool,
}

/// Renders legend entries in rows from `(left, top)`, no wider than `width`. Returns the markup and
/// its height in pixels.
fn legend(entries: &[LegendEntry<'_>], left: f64, top: f64, width: f64) -> (Markup, f64) {
    const ROW: f64 = 18.0;
    let (mut x, mut y) = (left, top + 12.0);
    let mut places = Vec::with_capacity(entries.len());
    for entry in entries {
        let wide = 34.0 + width_of(entry.name) + 12.0;
        if x > left && x + wide > left + width {
            x = left;
            y += ROW;
        }
        places.push((x, y));
        x += wide;
    }
    let markup = html! {
        g class="legend" {
            @for (entry, (x, y)) in entries.iter().zip(&places) {
                g class={ "s" (entry.style % STYLES) } {
                    @if entry.line {
                        line class={ "line d" (entry.style % STYLES) } x1=(px(*x)) x2=(px(x + 26.0)) y1=(px(y - 4.0)) y2=(px(y - 4.0)) {}
                    } @else if !entry.dots {
                        rect class="bar" x=(px(x + 6.0)) y=(px(y - 10.0)) width="14" height="12" {}
                    }
                    @if entry.dots { (marker(entry.style, x + 13.0, y - 4.0, 4.0)) }
                    text x=(px(x + 32.0)) y=(px(*y)) { (entry.name) }
                }
            }
        }
    };
    let height = if entries.is_empty() { 0.0 } else { y - top + 6.0 };
    (markup, height)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_legend_is_wrapped() {
        let entry = |name| LegendEntry { name, style: 0, line: true, dots: true };
        let (_, one) = legend(&[entry("reads"), entry("writes")], 0.0, 0.0, 400.0);
        let (_, two) =
            legend(&[entry("a target with a long name"), entry("another one of that kind")], 0.0, 0.0, 300.0);
        assert_eq!((one, two, legend(&[], 0.0, 0.0, 9.0).1), (18.0, 36.0, 0.0));
    }

    #[test]
    fn a_standalone_plot_has_its_title_and_colours() {
        let frame = Frame { id: "x", title: "IOPS & more", description: "d", width: 400.0, height: 100.0 };
        let figure = frame.wrap(&html! { text { "inside" } });
        let svg = standalone(&figure, "Made by -- me").unwrap();
        assert!(svg.starts_with("<svg xmlns=") && svg.ends_with("</svg>\n"), "{svg}");
        for part in
            ["viewBox=\"0 -32 400 132\"", "IOPS &amp; more</text>", ">inside</text>", "--s0:", "<!-- Made by  me -->"]
        {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        assert_eq!(standalone(&html! { p {} }, ""), None);
    }

    #[test]
    fn names_are_escaped() {
        let frame =
            Frame { id: "x", title: "<script>alert(1)</script>", description: "a & b", width: 10.0, height: 10.0 };
        let text = frame.wrap(&html! {}).into_string();
        assert!(!text.contains("<script>") && text.contains("a &amp; b"), "{text}");
    }
}
