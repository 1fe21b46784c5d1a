//! Bar charts with horizontal, stacked bars and whiskers for ranges.

use super::{Frame, LegendEntry, STYLES, Scale, legend, px, width_of};
use maud::{Markup, html};

const WIDTH: f64 = 640.0;
const ROW: f64 = 26.0;
const BAR: f64 = 15.0;
const BOTTOM: f64 = 48.0;

/// A part of a stacked bar.
#[derive(Debug, Clone)]
pub struct Part {
    /// Length of the part, in the unit of the axis.
    pub value: f64,
    /// Number of the colour; also the index of the part's name in [`BarChart::parts`].
    pub style: usize,
}

/// A bar.
#[derive(Debug, Clone)]
pub struct Bar {
    /// Label on the left.
    pub name: String,
    /// Parts of the bar, from the left.
    pub parts: Vec<Part>,
    /// Ends of the whisker; `None`: no whisker.
    pub range: Option<(f64, f64)>,
    /// Figure on the right of the bar.
    pub figure: String,
    /// Tooltip.
    pub tooltip: String,
}

/// A bar chart.
pub struct BarChart<'a> {
    /// Id of the element, unique in the page.
    pub id: String,
    /// Title of the plot.
    pub title: String,
    /// Description for screen readers.
    pub description: String,
    /// Title of the axis, with unit.
    pub axis: &'a str,
    /// Formats a tick.
    pub write: &'a dyn Fn(f64) -> String,
    /// Names of the parts, for the legend.
    pub parts: Vec<String>,
    /// The bars, from the top.
    pub bars: Vec<Bar>,
    /// Value and name of a vertical reference line.
    pub reference: Option<(f64, String)>,
}

impl BarChart<'_> {
    /// Renders the plot.
    pub fn render(&self) -> Markup {
        let widest = |texts: &mut dyn Iterator<Item = &String>| texts.map(|text| width_of(text)).fold(0.0, f64::max);
        let left = (widest(&mut self.bars.iter().map(|bar| &bar.name)) + 14.0).clamp(60.0, 240.0);
        let right = widest(&mut self.bars.iter().map(|bar| &bar.figure)) + 16.0;
        let width = (WIDTH - left - right).max(150.0);
        let entries: Vec<LegendEntry<'_>> = self
            .parts
            .iter()
            .enumerate()
            .map(|(style, name)| LegendEntry { name, style, line: false, dots: false })
            .collect();
        let (names, names_height) = legend(&entries, 8.0, 2.0, WIDTH - 16.0);
        let top = names_height + if self.reference.is_some() { 24.0 } else { 10.0 };
        let bottom = top + ROW * self.bars.len() as f64;
        let highest = self
            .bars
            .iter()
            .map(|bar| bar.total().max(bar.range.map_or(0.0, |(_, high)| high)))
            .chain(self.reference.iter().map(|(value, _)| *value))
            .fold(0.0, f64::max);
        let scale = Scale::from_zero(highest);
        let x = |value: f64| left + scale.share(value) * width;
        let inside = html! {
            (names)
            g class="axes" {
                @for tick in scale.ticks() {
                    line class="grid" x1=(px(x(tick.at))) x2=(px(x(tick.at))) y1=(px(top)) y2=(px(bottom)) {}
                    text text-anchor="middle" x=(px(x(tick.at))) y=(px(bottom + 16.0)) { ((self.write)(tick.at)) }
                }
                line class="axis" x1=(px(left)) x2=(px(left)) y1=(px(top)) y2=(px(bottom)) {}
                text class="axis-title" text-anchor="middle" x=(px(left + width / 2.0)) y=(px(bottom + 36.0)) { (self.axis) }
            }
            @for (index, bar) in self.bars.iter().enumerate() {
                (draw(bar, top + ROW * index as f64, left, &x))
            }
            @if let Some((value, name)) = &self.reference {
                line class="rule" x1=(px(x(*value))) x2=(px(x(*value))) y1=(px(top - 4.0)) y2=(px(bottom)) { title { (name) } }
                @let end = x(*value) + width_of(name) > WIDTH;
                text class="note rule-name" text-anchor=(if end { "end" } else { "middle" }) x=(px(x(*value))) y=(px(top - 9.0)) { (name) }
            }
        };
        Frame {
            id: &self.id,
            title: &self.title,
            description: &self.description,
            width: WIDTH,
            height: bottom + BOTTOM,
        }
        .wrap(&inside)
    }
}

impl Bar {
    fn total(&self) -> f64 {
        self.parts.iter().map(|part| part.value).sum()
    }
}

fn draw(bar: &Bar, row: f64, left: f64, x: &dyn Fn(f64) -> f64) -> Markup {
    let middle = row + ROW / 2.0;
    let mut from = 0.0;
    let parts: Vec<(f64, f64, usize)> = bar
        .parts
        .iter()
        .map(|part| {
            let begin = x(from);
            from += part.value;
            (begin, x(from) - begin, part.style)
        })
        .collect();
    let end = bar.range.map_or(x(from), |(_, high)| x(high).max(x(from)));
    html! {
        g class="point" {
            title { (bar.tooltip) }
            rect class="hit" x="0" y=(px(row)) width=(px(WIDTH)) height=(px(ROW)) {}
            text text-anchor="end" x=(px(left - 7.0)) y=(px(middle + 4.0)) { (shortened(&bar.name)) }
            @for (begin, wide, style) in &parts {
                g class={ "s" (style % STYLES) } {
                    rect class="bar" x=(px(*begin)) y=(px(middle - BAR / 2.0)) width=(px(wide.max(0.5))) height=(px(BAR)) {}
                }
            }
            @if let Some((low, high)) = bar.range {
                @let (low, high) = (x(low), x(high));
                path class="whisker" d={ "M" (px(low)) " " (px(middle)) "L" (px(high)) " " (px(middle)) "M" (px(low)) " " (px(middle - 4.0)) "v8M" (px(high)) " " (px(middle - 4.0)) "v8" } {}
            }
            text class="figure" x=(px(end + 7.0)) y=(px(middle + 4.0)) { (bar.figure) }
        }
    }
}

/// Shortens a name so that it fits on the left. The tooltip has the whole name.
fn shortened(name: &str) -> String {
    // Fewer than `width_of` would allow: capitals are wider than the mean.
    const MOST: usize = 30;
    if name.chars().count() <= MOST {
        return name.to_owned();
    }
    let kept: String = name.chars().take(MOST - 1).collect();
    format!("{kept}…")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_have_names_figures_parts_and_whiskers() {
        let bar = |name: &str, user, system| Bar {
            name: name.into(),
            parts: vec![Part { value: user, style: 0 }, Part { value: system, style: 1 }],
            range: Some((user, user + system + 1.0)),
            figure: format!("{} µs", user + system),
            tooltip: format!("{name}: user {user}, system {system}"),
        };
        let chart = BarChart {
            id: "b".into(),
            title: "CPU".into(),
            description: "two bars".into(),
            axis: "CPU time for each request (µs)",
            write: &|value| format!("{value}"),
            parts: vec!["user".into(), "system".into()],
            bars: vec![bar("raw", 1.0, 2.0), bar("vhdx", 1.5, 2.5)],
            reference: Some((3.0, "the raw file".into())),
        };
        let text = chart.render().into_string();
        for part in ["raw: user 1", "4 µs", "CPU time for each request (µs)", "whisker", ">system<", "the raw file"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        assert_eq!(text.matches("class=\"bar\"").count(), 6, "{text}");
        let empty = BarChart { bars: vec![], reference: None, ..chart };
        assert!(!empty.render().into_string().contains("NaN"));
    }
}
