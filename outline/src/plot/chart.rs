//! Line charts and scatter plots.

use super::{Frame, LegendEntry, STYLES, Scale, legend, marker, px, width_of};
use maud::{Markup, html};

const WIDTH: f64 = 640.0;
const PLOT_HEIGHT: f64 = 270.0;
const RIGHT: f64 = 18.0;
const BOTTOM: f64 = 50.0;
/// Lines with more points have no markers.
const MARKED_POINTS: usize = 40;
/// Maximum number of points of a line that have a tooltip.
const HOVER_POINTS: usize = 120;
/// A band of fewer pixels cannot be seen beside its line.
const SEEN: f64 = 1.0;

/// An axis of a chart.
pub struct Axis<'a> {
    /// Title with unit, as in "IOPS", "latency (log scale)".
    pub title: &'a str,
    /// Scale of the axis.
    pub scale: Scale,
    /// Formats a tick.
    pub write: &'a dyn Fn(f64) -> String,
    /// Values of the ticks; `None`: the ticks of the scale.
    pub at: Option<Vec<f64>>,
}

/// A data point.
#[derive(Debug, Clone)]
pub struct Point {
    /// Value on the horizontal axis.
    pub x: f64,
    /// Value on the vertical axis.
    pub y: f64,
    /// Tooltip, as in "queue depth 8: 41,200 IOPS, 194 us".
    pub tooltip: String,
}

/// A series of data points.
#[derive(Debug, Clone)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Data points, in the order in which a line joins them.
    pub points: Vec<Point>,
    /// Number of the colour, dash and marker.
    pub style: usize,
    /// Whether a line joins the points.
    pub line: bool,
    /// Bound of the error of the horizontal values, drawn as a band of twice this width around the
    /// line. 0: no band.
    pub x_error: f64,
}

/// A shaded range of the horizontal axis.
#[derive(Debug, Clone)]
pub struct Band {
    /// Start of the range.
    pub from: f64,
    /// End of the range.
    pub to: f64,
    /// Name above the range.
    pub name: String,
    /// CSS class: `warm`, `window`.
    pub class: &'static str,
}

/// A labelled point, such as a knee.
#[derive(Debug, Clone)]
pub struct Mark {
    /// Value on the horizontal axis.
    pub x: f64,
    /// Value on the vertical axis.
    pub y: f64,
    /// Label.
    pub name: String,
    /// Tooltip.
    pub tooltip: String,
}

/// A vertical line across the plot.
#[derive(Debug, Clone)]
pub struct Rule {
    /// Value on the horizontal axis.
    pub x: f64,
    /// Label.
    pub name: String,
}

/// A line chart or scatter plot.
pub struct LineChart<'a> {
    /// Id of the element, unique in the page.
    pub id: String,
    /// Title of the plot.
    pub title: String,
    /// Description for screen readers, one or two sentences.
    pub description: String,
    /// Horizontal axis.
    pub x: Axis<'a>,
    /// Vertical axis.
    pub y: Axis<'a>,
    /// The series.
    pub series: Vec<Series>,
    /// Shaded ranges.
    pub bands: Vec<Band>,
    /// Labelled points.
    pub marks: Vec<Mark>,
    /// Vertical lines.
    pub rules: Vec<Rule>,
}

/// The rectangle between the axes, in pixels.
struct Area {
    left: f64,
    top: f64,
    width: f64,
    height: f64,
}

impl Area {
    fn right(&self) -> f64 {
        self.left + self.width
    }

    fn bottom(&self) -> f64 {
        self.top + self.height
    }
}

impl LineChart<'_> {
    /// Renders the plot.
    pub fn render(&self) -> Markup {
        let entries: Vec<LegendEntry<'_>> = self
            .series
            .iter()
            .map(|series| LegendEntry {
                name: &series.name,
                style: series.style,
                line: series.line,
                dots: !series.line || series.points.len() <= MARKED_POINTS,
            })
            .collect();
        let y_ticks = self.y.ticks();
        let widest = y_ticks.iter().map(|(_, label)| label.as_deref().map_or(0.0, width_of)).fold(0.0, f64::max);
        let left = (widest + 34.0).max(52.0);
        let (names, names_height) = legend(&entries, left, 2.0, WIDTH - left - RIGHT);
        let bands_height = if self.bands.is_empty() && self.rules.is_empty() { 0.0 } else { 18.0 };
        let area =
            Area { left, top: names_height + bands_height + 10.0, width: WIDTH - left - RIGHT, height: PLOT_HEIGHT };
        let inside = html! {
            (names)
            (self.draw_bands(&area))
            (self.draw_axes(&area, &y_ticks))
            (self.draw_rules(&area))
            @for series in &self.series { (self.draw_series(&area, series)) }
            (self.draw_marks(&area))
        };
        let height = area.bottom() + BOTTOM;
        Frame { id: &self.id, title: &self.title, description: &self.description, width: WIDTH, height }.wrap(&inside)
    }

    fn x(&self, area: &Area, value: f64) -> f64 {
        area.left + self.x.scale.share(value) * area.width
    }

    fn y(&self, area: &Area, value: f64) -> f64 {
        area.bottom() - self.y.scale.share(value) * area.height
    }

    fn draw_bands(&self, area: &Area) -> Markup {
        html! {
            @for band in &self.bands {
                @let (from, to) = (self.x(area, band.from), self.x(area, band.to));
                @if to - from >= 0.5 {
                    rect class={ "band " (band.class) } x=(px(from)) y=(px(area.top)) width=(px(to - from)) height=(px(area.height)) {
                        title { (band.name) }
                    }
                    // A name that does not fit is only in the tooltip.
                    @if width_of(&band.name) < to - from {
                        text class="note" text-anchor="middle" x=(px((from + to) / 2.0)) y=(px(area.top - 5.0)) { (band.name) }
                    }
                }
            }
        }
    }

    fn draw_axes(&self, area: &Area, y_ticks: &[(f64, Option<String>)]) -> Markup {
        let x_ticks = self.spaced(area);
        html! {
            g class="axes" {
                @for (at, label) in y_ticks {
                    @let y = self.y(area, *at);
                    line class=(if label.is_some() { "grid" } else { "grid minor" }) x1=(px(area.left)) x2=(px(area.right())) y1=(px(y)) y2=(px(y)) {}
                    @if let Some(label) = label {
                        text text-anchor="end" x=(px(area.left - 7.0)) y=(px(y + 4.0)) { (label) }
                    }
                }
                @for (at, label) in &x_ticks {
                    @let x = self.x(area, *at);
                    line class=(if label.is_some() { "grid" } else { "grid minor" }) x1=(px(x)) x2=(px(x)) y1=(px(area.top)) y2=(px(area.bottom())) {}
                    @if let Some(label) = label {
                        text text-anchor="middle" x=(px(x)) y=(px(area.bottom() + 17.0)) { (label) }
                    }
                }
                line class="axis" x1=(px(area.left)) x2=(px(area.right())) y1=(px(area.bottom())) y2=(px(area.bottom())) {}
                line class="axis" x1=(px(area.left)) x2=(px(area.left)) y1=(px(area.top)) y2=(px(area.bottom())) {}
                text class="axis-title" text-anchor="middle" x=(px(area.left + area.width / 2.0)) y=(px(area.bottom() + 38.0)) { (self.x.title) }
                @let middle = area.top + area.height / 2.0;
                text class="axis-title" text-anchor="middle" x="13" y=(px(middle)) transform={ "rotate(-90 13 " (px(middle)) ")" } { (self.y.title) }
            }
        }
    }

    /// The horizontal ticks. A label that would overlap the one before it is omitted.
    fn spaced(&self, area: &Area) -> Vec<(f64, Option<String>)> {
        let mut free_from = f64::NEG_INFINITY;
        let mut ticks = self.x.ticks();
        for (at, label) in &mut ticks {
            let x = self.x(area, *at);
            if let Some(text) = label {
                let half = width_of(text) / 2.0;
                if x - half < free_from {
                    *label = None;
                } else {
                    free_from = x + half + 6.0;
                }
            }
        }
        ticks
    }

    fn draw_rules(&self, area: &Area) -> Markup {
        html! {
            @for rule in &self.rules {
                @let x = self.x(area, rule.x);
                line class="rule" x1=(px(x)) x2=(px(x)) y1=(px(area.top)) y2=(px(area.bottom())) { title { (rule.name) } }
                @let end = x + width_of(&rule.name) > area.right();
                text class="note rule-name" text-anchor=(if end { "end" } else { "start" })
                    x=(px(if end { x - 4.0 } else { x + 4.0 })) y=(px(area.bottom() - 7.0)) { (rule.name) }
            }
        }
    }

    fn draw_series(&self, area: &Area, series: &Series) -> Markup {
        let places: Vec<(f64, f64)> =
            series.points.iter().map(|point| (self.x(area, point.x), self.y(area, point.y))).collect();
        let path: String = super::downsample(&places, 2000)
            .iter()
            .enumerate()
            .map(|(index, (x, y))| format!("{}{} {}", if index == 0 { "M" } else { "L" }, px(*x), px(*y)))
            .collect();
        let marked = !series.line || series.points.len() <= MARKED_POINTS;
        let every = series.points.len().div_ceil(HOVER_POINTS).max(1);
        html! {
            g class={ "series s" (series.style % STYLES) } {
                @if let Some(band) = self.error_band(area, series) { path class="error" d=(band) {} }
                @if series.line && places.len() > 1 {
                    path class={ "line d" (series.style % STYLES) } d=(path) {}
                }
                @for (point, (x, y)) in series.points.iter().zip(&places).step_by(if marked { 1 } else { every }) {
                    g class="point" {
                        title { (point.tooltip) }
                        // Invisible and larger than the marker, so that it is easy to point at.
                        circle class="hit" cx=(px(*x)) cy=(px(*y)) r="9" {}
                        @if marked { (marker(series.style, *x, *y, 4.0)) }
                    }
                }
            }
        }
    }

    /// The area that a line covers when it is moved to both sides by its error; `None` where the
    /// error is too small to be seen.
    fn error_band(&self, area: &Area, series: &Series) -> Option<String> {
        let places: Vec<(f64, f64)> = series.points.iter().map(|point| (point.x, point.y)).collect();
        let ends: Vec<[f64; 3]> = super::downsample(&places, 2000)
            .into_iter()
            .map(|(x, y)| [self.x(area, x - series.x_error), self.x(area, x + series.x_error), self.y(area, y)])
            .collect();
        if !ends.iter().any(|[left, right, _]| right - left >= SEEN) {
            return None;
        }
        // A parallelogram for each piece of the line, all of them in one direction of rotation:
        // others would cut holes where they overlap.
        let piece = |pair: &[[f64; 3]]| {
            let [upper, lower] = if pair[0][2] <= pair[1][2] { [pair[0], pair[1]] } else { [pair[1], pair[0]] };
            format!(
                "M{} {}H{}L{} {}H{}Z",
                px(upper[0]),
                px(upper[2]),
                px(upper[1]),
                px(lower[1]),
                px(lower[2]),
                px(lower[0])
            )
        };
        Some(ends.windows(2).map(piece).collect())
    }

    fn draw_marks(&self, area: &Area) -> Markup {
        let mut taken: Vec<(f64, f64, f64)> = Vec::new();
        let placed: Vec<(&Mark, f64, f64, f64)> = self
            .marks
            .iter()
            .map(|mark| {
                let (x, y) = (self.x(area, mark.x), self.y(area, mark.y));
                let half = width_of(&mark.name) / 2.0 + 4.0;
                let at = x.clamp(area.left + half, (area.right() - half).max(area.left + half));
                // Above the point, then below, then further away: the first row without another
                // label.
                let free = |row: f64, taken: &[(f64, f64, f64)]| {
                    row > area.top + 8.0
                        && row < area.bottom() - 4.0
                        && taken.iter().all(|(other, other_row, other_half)| {
                            (at - other).abs() > half + other_half || (row - other_row).abs() > 15.0
                        })
                };
                let rows = [y - 14.0, y + 24.0, y - 30.0, y + 40.0, y - 46.0, y + 56.0];
                let row = rows.into_iter().find(|row| free(*row, &taken)).unwrap_or(y - 14.0);
                taken.push((at, row, half));
                (mark, x, row, at)
            })
            .collect();
        html! {
            g class="marks" {
                @for (mark, x, row, at) in &placed {
                    @let y = self.y(area, mark.y);
                    g class="point" {
                        title { (mark.tooltip) }
                        line class="lead" x1=(px(*x)) y1=(px(y)) x2=(px(*at)) y2=(px(if *row < y { row + 4.0 } else { row - 11.0 })) {}
                        circle class="ring" cx=(px(*x)) cy=(px(y)) r="7.5" {}
                        text class="mark-name" text-anchor="middle" x=(px(*at)) y=(px(*row)) { (mark.name) }
                    }
                }
            }
        }
    }
}

impl Axis<'_> {
    fn ticks(&self) -> Vec<(f64, Option<String>)> {
        match &self.at {
            Some(values) => values.iter().map(|at| (*at, Some((self.write)(*at)))).collect(),
            None => {
                let ticks = self.scale.ticks().into_iter();
                ticks.map(|tick| (tick.at, tick.labelled.then(|| (self.write)(tick.at)))).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(value: f64) -> String {
        format!("{value}")
    }

    fn chart(points: usize) -> LineChart<'static> {
        let points =
            (0..points).map(|n| Point { x: n as f64, y: (n * n) as f64, tooltip: format!("point {n}") }).collect();
        LineChart {
            id: "c".into(),
            title: "A title".into(),
            description: "rises".into(),
            x: Axis { title: "x (s)", scale: Scale::between(0.0, 9.0), write: &plain, at: None },
            y: Axis { title: "y (IOPS)", scale: Scale::from_zero(81.0), write: &plain, at: None },
            series: vec![Series { name: "one".into(), points, style: 0, line: true, x_error: 0.0 }],
            bands: vec![Band { from: 0.0, to: 5.0, name: "warm-up".into(), class: "warm" }],
            marks: vec![Mark { x: 3.0, y: 9.0, name: "knee".into(), tooltip: "the knee".into() }],
            rules: vec![],
        }
    }

    #[test]
    fn a_chart_has_title_axes_with_units_legend_labels_and_tooltips() {
        let text = chart(10).render().into_string();
        for part in [
            "<title id=\"c-t\">A title",
            "<desc id=\"c-d\">rises",
            "x (s)",
            "y (IOPS)",
            ">one<",
            "warm-up",
            "point 9",
            ">knee<",
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }

    #[test]
    fn an_error_is_a_band_around_its_line_unless_it_is_too_small_to_see() {
        let mut chart = chart(3);
        assert!(!chart.render().into_string().contains("class=\"error\""));
        chart.series[0].x_error = 1e-6;
        assert!(!chart.render().into_string().contains("class=\"error\""));
        chart.series[0].x_error = 0.5;
        chart.series[0].points.swap(1, 2);
        let text = chart.render().into_string();
        let band = text.split_once("class=\"error\" d=\"").unwrap().1.split_once('"').unwrap().0;
        let pieces: Vec<Vec<f64>> = band
            .split_terminator('Z')
            .map(|piece| piece.split(['M', 'H', 'L', ' ']).filter_map(|number| number.parse().ok()).collect())
            .collect();
        assert_eq!(pieces.len(), 2);
        for piece in pieces {
            // Left, top, right; right below, bottom, left below.
            let [left, top, right, below_right, bottom, below_left] = piece[..] else { panic!("{piece:?}") };
            assert!(right > left && below_right > below_left && bottom > top, "{band}");
        }
    }

    #[test]
    fn a_chart_with_no_points_and_one_with_many_are_rendered() {
        assert!(!chart(0).render().into_string().contains("NaN"));
        let many = chart(100_000).render().into_string();
        assert!(many.len() < 100_000, "{} bytes", many.len());
    }
}
