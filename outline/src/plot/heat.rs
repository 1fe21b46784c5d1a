//! Heat maps: a figure for each pair of two varied parameters. The colour map is cividis, whose
//! lightness rises evenly and which is safe for the common colour vision deficiencies. Each cell
//! contains its figure.

use super::{Frame, px, width_of};
use maud::{Markup, html};

const CELL_HEIGHT: f64 = 34.0;
const LEGEND: f64 = 54.0;

/// A heat map.
pub struct HeatMap<'a> {
    /// Id of the element, unique in the page.
    pub id: String,
    /// Title of the plot.
    pub title: String,
    /// Description for screen readers.
    pub description: String,
    /// Parameter of the columns, with unit.
    pub x_title: &'a str,
    /// Parameter of the rows, with unit.
    pub y_title: &'a str,
    /// Figure of the cells, with unit.
    pub z_title: &'a str,
    /// Names of the columns.
    pub columns: Vec<String>,
    /// Names of the rows, the first at the bottom.
    pub rows: Vec<String>,
    /// The cells of each row; `None`: not measured.
    pub cells: Vec<Vec<Option<f64>>>,
    /// Formats a figure.
    pub write: &'a dyn Fn(f64) -> String,
    /// Whether the colour map is logarithmic, for figures over several decades.
    pub log: bool,
    /// Labelled cells: row, column, label.
    pub marks: Vec<(usize, usize, String)>,
}

impl HeatMap<'_> {
    /// Renders the plot.
    pub fn render(&self) -> Markup {
        let values = || self.cells.iter().flatten().flatten().copied().filter(|value| value.is_finite());
        let (low, high) = (values().fold(f64::INFINITY, f64::min), values().fold(f64::NEG_INFINITY, f64::max));
        let left = 34.0 + self.rows.iter().map(|name| width_of(name)).fold(0.0, f64::max);
        let words = || self.columns.iter().flat_map(|name| name.split(' '));
        let widest =
            values().map(|value| width_of(&(self.write)(value))).chain(words().map(width_of)).fold(34.0, f64::max)
                + 10.0;
        let lines = self.columns.iter().map(|name| name.split(' ').count()).max().unwrap_or(1) as f64;
        let foot = 24.0 + 13.0 * lines;
        let columns = self.columns.len().max(1) as f64;
        let cell_width = ((640.0 - left - 16.0) / columns).clamp(widest, 120.0);
        let width = (left + cell_width * columns + 16.0).max(320.0);
        let (top, bottom) = (LEGEND, LEGEND + CELL_HEIGHT * self.rows.len() as f64);
        let inside = html! {
            (self.draw_key(left, low, high))
            @for (row, cells) in self.cells.iter().enumerate() {
                @let y = bottom - CELL_HEIGHT * (row as f64 + 1.0);
                text class="tick" text-anchor="end" x=(px(left - 7.0)) y=(px(y + CELL_HEIGHT / 2.0 + 4.0)) { (self.name_of_row(row)) }
                @for (column, value) in cells.iter().enumerate() {
                    (self.draw_cell(row, column, *value, left + cell_width * column as f64, y, cell_width, (low, high)))
                }
            }
            @for (column, name) in self.columns.iter().enumerate() {
                @let x = px(left + cell_width * (column as f64 + 0.5));
                // Each word of a name is on a line of its own.
                text class="tick" text-anchor="middle" y=(px(bottom + 17.0)) {
                    @for (line, word) in name.split(' ').enumerate() { tspan x=(x) dy=(if line == 0 { "0" } else { "13" }) { (word) } }
                }
            }
            @let middle = (top + bottom) / 2.0;
            text class="axis-title" text-anchor="middle" x=(px(left + cell_width * columns / 2.0)) y=(px(bottom + foot)) { (self.x_title) }
            text class="axis-title" text-anchor="middle" x="13" y=(px(middle)) transform={ "rotate(-90 13 " (px(middle)) ")" } { (self.y_title) }
        };
        Frame { id: &self.id, title: &self.title, description: &self.description, width, height: bottom + foot + 12.0 }
            .wrap(&inside)
    }

    fn name_of_row(&self, row: usize) -> &str {
        self.rows.get(row).map_or("", String::as_str)
    }

    #[allow(clippy::too_many_arguments)]
    fn draw_cell(
        &self,
        row: usize,
        column: usize,
        value: Option<f64>,
        x: f64,
        y: f64,
        width: f64,
        range: (f64, f64),
    ) -> Markup {
        let place = format!(
            "{} {}, {} {}",
            self.x_title,
            self.columns.get(column).map_or("", String::as_str),
            self.y_title,
            self.name_of_row(row)
        );
        let mark = self
            .marks
            .iter()
            .find(|(at_row, at_column, _)| (*at_row, *at_column) == (row, column))
            .map(|(_, _, word)| word);
        let Some(value) = value else {
            return html! {
                g class="point" {
                    title { (place) ": not measured" }
                    rect class="cell empty" x=(px(x)) y=(px(y)) width=(px(width)) height=(px(CELL_HEIGHT)) {}
                }
            };
        };
        let colour = cividis(self.share(value, range));
        let ink = if lightness(colour) > 0.48 { "#000" } else { "#fff" };
        let text_y = y + CELL_HEIGHT / 2.0 + if mark.is_some() { -1.0 } else { 4.0 };
        html! {
            g class="point" {
                title { (place) ": " (self.z_title) " " ((self.write)(value)) @if let Some(word) = mark { ", " (word) } }
                rect class="cell" x=(px(x)) y=(px(y)) width=(px(width)) height=(px(CELL_HEIGHT)) fill=(hex(colour)) {}
                text class="in-cell" text-anchor="middle" x=(px(x + width / 2.0)) y=(px(text_y)) style={ "fill:" (ink) } { ((self.write)(value)) }
                @if let Some(word) = mark {
                    rect class="chosen" x=(px(x + 1.5)) y=(px(y + 1.5)) width=(px(width - 3.0)) height=(px(CELL_HEIGHT - 3.0)) style={ "stroke:" (ink) } {}
                    text class="in-cell small" text-anchor="middle" x=(px(x + width / 2.0)) y=(px(text_y + 11.5)) style={ "fill:" (ink) } { (word) }
                }
            }
        }
    }

    fn share(&self, value: f64, (low, high): (f64, f64)) -> f64 {
        let share =
            if self.log && low > 0.0 { (value / low).ln() / (high / low).ln() } else { (value - low) / (high - low) };
        if share.is_nan() { 0.5 } else { share.clamp(0.0, 1.0) }
    }

    /// The legend: the colour map with the lowest and the highest figure.
    fn draw_key(&self, left: f64, low: f64, high: f64) -> Markup {
        const STEPS: usize = 24;
        const STEP: f64 = 6.0;
        let end = left + STEP * STEPS as f64;
        html! {
            @if low.is_finite() {
                g class="legend" {
                    text x=(px(left)) y="13" { (self.z_title) @if self.log { " (colours by its logarithm)" } }
                    @for step in 0..STEPS {
                        rect x=(px(left + STEP * step as f64)) y="20" width=(px(STEP + 0.4)) height="9" fill=(hex(cividis(step as f64 / (STEPS - 1) as f64))) {}
                    }
                    text class="note" x=(px(left)) y="43" { ((self.write)(low)) }
                    text class="note" text-anchor="end" x=(px(end)) y="43" { ((self.write)(high)) }
                }
            }
        }
    }
}

type Colour = (f64, f64, f64);

/// The cividis colour map, interpolated between nine points.
fn cividis(share: f64) -> Colour {
    const POINTS: [Colour; 9] = [
        (0.0, 34.0, 78.0),
        (26.0, 56.0, 111.0),
        (65.0, 77.0, 107.0),
        (95.0, 98.0, 110.0),
        (124.0, 123.0, 120.0),
        (156.0, 147.0, 117.0),
        (189.0, 174.0, 107.0),
        (224.0, 203.0, 88.0),
        (254.0, 232.0, 56.0),
    ];
    let at = share.clamp(0.0, 1.0) * (POINTS.len() - 1) as f64;
    let before = (at as usize).min(POINTS.len() - 2);
    let (from, to, part) = (POINTS[before], POINTS[before + 1], at - before as f64);
    (from.0 + (to.0 - from.0) * part, from.1 + (to.1 - from.1) * part, from.2 + (to.2 - from.2) * part)
}

/// Lightness of a colour, 0 to 1.
fn lightness((red, green, blue): Colour) -> f64 {
    (0.299 * red + 0.587 * green + 0.114 * blue) / 255.0
}

fn hex((red, green, blue): Colour) -> String {
    format!("#{:02x}{:02x}{:02x}", red as u8, green as u8, blue as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_colour_map_rises_in_lightness() {
        let lights: Vec<f64> = (0..=50).map(|step| lightness(cividis(f64::from(step) / 50.0))).collect();
        assert!(lights.windows(2).all(|pair| pair[0] < pair[1]), "{lights:?}");
        assert_eq!(hex(cividis(0.0)), "#00224e");
    }

    #[test]
    fn each_cell_has_a_tooltip_with_its_row_column_and_figure() {
        let map = HeatMap {
            id: "h".into(),
            title: "IOPS".into(),
            description: "two by two".into(),
            x_title: "queue depth",
            y_title: "threads",
            z_title: "IOPS",
            columns: vec!["1".into(), "2".into()],
            rows: vec!["1".into(), "4".into()],
            cells: vec![vec![Some(10.0), Some(20.0)], vec![Some(30.0), None]],
            write: &|value| format!("{value}"),
            log: false,
            marks: vec![(1, 0, "saturation".into())],
        };
        let text = map.render().into_string();
        for part in ["queue depth 1, threads 4: IOPS 30, saturation", "queue depth 2, threads 4: not measured", ">20<"]
        {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        let flat = HeatMap { cells: vec![vec![Some(1.0), Some(1.0)]], rows: vec!["1".into()], marks: vec![], ..map };
        assert!(!flat.render().into_string().contains("NaN"));
    }
}
