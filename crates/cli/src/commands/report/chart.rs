//! Charts as SVG: a map of bars, a grid of colours, and points over two axes. Colours are CSS classes, for which the page's
//! style has a light and a dark form.

use super::markup::Markup;

/// Width of every chart, in pixels.
const WIDTH: f64 = 920.0;
/// Room for names on the left, in pixels.
const LEFT: f64 = 90.0;
/// Room on the right, in pixels.
const RIGHT: f64 = 20.0;
/// Number of colours of a grid, `h0` to `h9`.
pub const SHADES: usize = 10;
/// CSS classes of the colours.
const CLASSES: [&str; SHADES] = ["h0", "h1", "h2", "h3", "h4", "h5", "h6", "h7", "h8", "h9"];
/// Height of a grid's scale of colours, in pixels.
const SCALE_HEIGHT: f64 = 28.0;
/// Most column numbers over a grid.
const MAX_NUMBERS: usize = 16;
/// Fewest ticks that show the scale of an axis.
const MIN_TICKS: usize = 3;

/// One bar of a map.
pub struct MapBar {
    /// Name of the bar's row.
    pub row: String,
    /// Length, on one scale for all bars.
    pub size: f64,
    /// CSS class of the bar's colour.
    pub class: &'static str,
    /// Text that is shown at the pointer.
    pub title: String,
}

/// Draws bars side by side in rows of one scale.
pub fn bar_map(label: &str, bars: &[MapBar]) -> Markup {
    const ROW: f64 = 18.0;
    let mut rows: Vec<&str> = Vec::new();
    for bar in bars {
        if !rows.contains(&bar.row.as_str()) {
            rows.push(&bar.row);
        }
    }
    let sum = |row: &str| bars.iter().filter(|b| b.row == row).map(|b| b.size).sum::<f64>();
    let longest = rows.iter().map(|row| sum(row)).fold(f64::MIN_POSITIVE, f64::max);
    let scale = (WIDTH - LEFT - RIGHT) / longest;
    let mut svg = open(label, ROW * rows.len() as f64 + 4.0);
    for (i, row) in rows.iter().enumerate() {
        let y = i as f64 * ROW + 2.0;
        name(&mut svg, y + 12.0, row);
        let mut x = LEFT;
        for bar in bars.iter().filter(|b| b.row == *row) {
            let width = bar.size * scale;
            svg.raw("<rect class=\"")
                .raw(bar.class)
                .raw("\"")
                .at("x", x)
                .at("y", y)
                .at("width", (width - 1.0).max(0.8));
            svg.at("height", ROW - 3.0).raw("><title>").text(&bar.title).raw("</title></rect>");
            x += width;
        }
    }
    svg.raw("</svg></div>");
    svg
}

/// A grid of values: one row for each name.
pub struct Grid {
    /// Names of rows.
    pub rows: Vec<String>,
    /// Values, row by row; none where there is no value.
    pub values: Vec<Vec<Option<f64>>>,
    /// Names of the columns; empty if the columns have numbers.
    pub columns: Vec<String>,
}

/// Draws a grid, coloured by the logarithm of its values: a larger value has a stronger colour. `shown` formats a value for
/// the pointer.
pub fn grid(label: &str, grid: &Grid, shown: impl Fn(f64) -> String) -> Markup {
    let columns = grid.values.iter().map(Vec::len).max().unwrap_or(0).max(1);
    let row_height = 14.0;
    let head = 18.0;
    let width = ((WIDTH - LEFT - RIGHT) / columns as f64).min(120.0);
    let range = log_range(grid.values.iter().flatten().flatten().copied());
    let foot = head + row_height * grid.rows.len() as f64;
    let mut svg = open(label, foot + SCALE_HEIGHT);
    // Columns without names have numbers, as many as there is room for.
    let step = columns.div_ceil(MAX_NUMBERS);
    let numbers = (0..columns).step_by(step).map(|j| (j, j.to_string()));
    let names = grid.columns.iter().cloned().enumerate();
    let heads: Vec<(usize, String)> =
        if grid.columns.is_empty() { numbers.collect() } else { names.collect() };
    for (j, head) in heads {
        svg.raw("<text class=\"tick\"")
            .at("x", LEFT + j as f64 * width + 2.0)
            .at("y", 12.0)
            .raw(">")
            .text(head)
            .raw("</text>");
    }
    for (i, (row, values)) in grid.rows.iter().zip(&grid.values).enumerate() {
        let y = head + i as f64 * row_height;
        name(&mut svg, y + 11.0, row);
        for (j, value) in values.iter().enumerate() {
            let Some(value) = value else { continue };
            let class = CLASSES[shade(*value, range)];
            svg.raw("<rect class=\"").raw(class).raw("\"").at("x", LEFT + j as f64 * width).at("y", y);
            svg.at("width", width + if width < 4.0 { 0.3 } else { -1.0 })
                .at("height", row_height - 1.0)
                .raw("><title>");
            svg.text(row).raw(", ");
            match grid.columns.get(j) {
                Some(column) => svg.text(column),
                None => svg.raw("position ").text(j),
            };
            svg.raw(": ").text(shown(*value)).raw("</title></rect>");
        }
    }
    color_scale(&mut svg, foot, range, shown);
    svg.raw("</svg></div>");
    svg
}

/// Draws the scale of a grid's colours, from the smallest value to the largest.
fn color_scale(svg: &mut Markup, y: f64, (low, high): (f64, f64), shown: impl Fn(f64) -> String) {
    const STEP: f64 = 22.0;
    if low > high {
        return;
    }
    let end = LEFT + 120.0 + SHADES as f64 * STEP;
    svg.raw("<text class=\"tick end\"").at("x", LEFT + 114.0).at("y", y + 20.0).raw(">");
    svg.text(shown(10f64.powf(low))).raw("</text>");
    for (i, class) in CLASSES.into_iter().enumerate() {
        svg.raw("<rect class=\"").raw(class).raw("\"").at("x", LEFT + 120.0 + i as f64 * STEP);
        svg.at("y", y + 10.0).at("width", STEP - 1.0).at("height", 12.0).raw("/>");
    }
    svg.raw("<text class=\"tick\"").at("x", end + 6.0).at("y", y + 20.0).raw(">");
    svg.text(shown(10f64.powf(high))).raw("</text>");
}

/// Returns the decimal logarithms of the smallest and the largest positive value; `(inf, -inf)` if there is none.
pub fn log_range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let mut range = (f64::INFINITY, f64::NEG_INFINITY);
    for log in values.filter(|v| *v > 0.0 && v.is_finite()).map(f64::log10) {
        range = (range.0.min(log), range.1.max(log));
    }
    range
}

/// Returns the shade of a value in a range of logarithms, 0 to `SHADES - 1`.
pub fn shade(value: f64, (low, high): (f64, f64)) -> usize {
    if !(value > 0.0 && value.is_finite() && high > low) {
        return 0;
    }
    let share = (value.log10() - low) / (high - low);
    ((share * SHADES as f64) as usize).min(SHADES - 1)
}

/// A point of a plot.
pub struct PlotPoint {
    /// Value on the horizontal axis.
    pub x: f64,
    /// Value on the vertical axis.
    pub y: f64,
    /// CSS class of the point's colour.
    pub class: &'static str,
    /// Text beside the point.
    pub name: String,
}

/// A plot of points and lines over two logarithmic axes.
pub struct Plot {
    /// Name of the horizontal axis.
    pub along: &'static str,
    /// Name of the vertical axis.
    pub up: &'static str,
    /// Points; only those with positive coordinates are drawn.
    pub points: Vec<PlotPoint>,
    /// Lines, each with its CSS class.
    pub lines: Vec<(&'static str, Vec<(f64, f64)>)>,
}

/// Draws a plot.
pub fn plot(label: &str, plot: &Plot) -> Markup {
    const HEIGHT: f64 = 340.0;
    const FOOT: f64 = 40.0;
    // Room for the name of the vertical axis.
    const HEAD: f64 = 28.0;
    let is_shown = |x: f64, y: f64| x > 0.0 && y > 0.0 && x.is_finite() && y.is_finite();
    let points: Vec<&PlotPoint> = plot.points.iter().filter(|p| is_shown(p.x, p.y)).collect();
    let nodes = || plot.lines.iter().flat_map(|(_, nodes)| nodes).filter(|(x, y)| is_shown(*x, *y));
    // Room enough for a tick or two around a single point.
    let widen = |(low, high): (f64, f64)| if low <= high { (low - 0.2, high + 0.2) } else { (0.0, 1.0) };
    let (x0, x1) = widen(log_range(points.iter().map(|p| p.x).chain(nodes().map(|n| n.0))));
    let (y0, y1) = widen(log_range(points.iter().map(|p| p.y).chain(nodes().map(|n| n.1))));
    let place = |x: f64, y: f64| {
        let along = LEFT + (x.log10() - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT - 120.0);
        (along, (HEIGHT - FOOT) - (y.log10() - y0) / (y1 - y0) * (HEIGHT - FOOT - HEAD))
    };
    let mut svg = open(label, HEIGHT);
    for tick in ticks(x0, x1) {
        let (x, _) = place(tick, 1.0);
        line(&mut svg, "rule", [(x, HEAD), (x, HEIGHT - FOOT)]);
        svg.raw("<text class=\"tick mid\"")
            .at("x", x)
            .at("y", HEIGHT - FOOT + 14.0)
            .raw(">")
            .text(short(tick))
            .raw("</text>");
    }
    for tick in ticks(y0, y1) {
        let (_, y) = place(1.0, tick);
        line(&mut svg, "rule", [(LEFT, y), (WIDTH - RIGHT - 120.0, y)]);
        svg.raw("<text class=\"tick end\"")
            .at("x", LEFT - 4.0)
            .at("y", y + 4.0)
            .raw(">")
            .text(short(tick))
            .raw("</text>");
    }
    for (class, nodes) in &plot.lines {
        let nodes = nodes.iter().filter(|(x, y)| is_shown(*x, *y)).map(|(x, y)| place(*x, *y));
        line(&mut svg, class, nodes);
    }
    for point in points {
        let (x, y) = place(point.x, point.y);
        svg.raw("<circle class=\"")
            .raw(point.class)
            .raw("\"")
            .at("cx", x)
            .at("cy", y)
            .raw(" r=\"4\"><title>")
            .text(&point.name);
        svg.raw(": ")
            .text(short(point.x))
            .raw(", ")
            .text(short(point.y))
            .raw("</title></circle><text class=\"tick\"");
        svg.at("x", x + 7.0).at("y", y + 4.0).raw(">").text(&point.name).raw("</text>");
    }
    svg.raw("<text class=\"tick mid\"")
        .at("x", WIDTH / 2.0)
        .at("y", HEIGHT - 6.0)
        .raw(">")
        .raw(plot.along)
        .raw("</text>");
    svg.raw("<text class=\"tick\"")
        .at("x", 4.0)
        .at("y", 10.0)
        .raw(">")
        .raw(plot.up)
        .raw("</text></svg></div>");
    svg
}

/// Returns the ticks between two logarithms: 1, 2 and 5 times powers of ten, the powers alone over more than two decades,
/// or values at equal distances if these are fewer than [`MIN_TICKS`].
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let steps: &[f64] = if high - low > 2.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
    let powers = (low.floor() as i32..=high.ceil() as i32).map(|p| 10f64.powi(p));
    let all = powers.flat_map(|p| steps.iter().map(move |s| s * p));
    let found: Vec<f64> = all.filter(|v| (low..=high).contains(&v.log10())).take(40).collect();
    if found.len() >= MIN_TICKS {
        return found;
    }
    let (from, to) = (10f64.powf(low), 10f64.powf(high));
    let power = 10f64.powf((to - from).log10().floor());
    let steps = [5.0, 2.0, 1.0, 0.5, 0.2].map(|s| s * power);
    let between = |step: f64| {
        let count = (from / step).ceil() as i64..=(to / step).floor() as i64;
        count.map(|n| n as f64 * step).take(40).collect::<Vec<f64>>()
    };
    steps.into_iter().map(between).find(|ticks| ticks.len() >= MIN_TICKS).unwrap_or(found)
}

/// Formats a number in a few characters.
pub fn short(x: f64) -> String {
    match x.abs() {
        0.0 => "0".into(),
        a if !(1e-3..1e6).contains(&a) => format!("{x:.1e}"),
        a if a >= 100.0 => format!("{x:.0}"),
        a if a >= 1.0 => format!("{x:.1}").trim_end_matches(".0").into(),
        _ => format!("{x:.4}").trim_end_matches('0').into(),
    }
}

fn open(label: &str, height: f64) -> Markup {
    let mut svg = Markup::default();
    svg.raw("<div class=\"wide\"><svg role=\"img\" viewBox=\"0 0 ")
        .number(WIDTH)
        .raw(" ")
        .number(height)
        .raw("\" aria-label=\"")
        .text(label)
        .raw("\">");
    svg
}

fn name(svg: &mut Markup, y: f64, text: &str) {
    svg.raw("<text class=\"tick end\"").at("x", LEFT - 6.0).at("y", y).raw(">").text(text).raw("</text>");
}

fn line(svg: &mut Markup, class: &'static str, nodes: impl IntoIterator<Item = (f64, f64)>) {
    svg.raw("<polyline class=\"").raw(class).raw("\" points=\"");
    for (x, y) in nodes {
        svg.number(x).raw(",").number(y).raw(" ");
    }
    svg.raw("\"/>");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(svg: &Markup, what: &str) -> usize {
        svg.clone().finish().matches(what).count()
    }

    #[test]
    fn maps_have_a_bar_for_each_and_one_scale() {
        let bar = |row: &str, size| MapBar { row: row.into(), size, class: "ane", title: "<b>".into() };
        let svg = bar_map("a \"map\"", &[bar("0", 1.0), bar("0", 3.0), bar("1", 2.0)]);
        assert_eq!(count(&svg, "<rect"), 3);
        let text = svg.finish();
        assert!(
            text.contains("&lt;b&gt;")
                && text.contains("a &quot;map&quot;")
                && text.ends_with("</svg></div>")
        );
        // The longest row fills the width, the other row half of it.
        assert!(text.contains("width=\"606.5\"") && text.contains("width=\"404.0\""), "{text}");
        assert_eq!(count(&bar_map("empty", &[]), "<rect"), 0);
    }

    #[test]
    fn grids_shade_by_the_logarithm() {
        assert_eq!([1e-4, 1e-2, 1.0].map(|v| shade(v, (-4.0, 0.0))), [0, 5, 9]);
        for odd in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(shade(odd, (-4.0, 0.0)), 0);
        }
        let values = vec![vec![Some(0.1), None], vec![Some(0.0), Some(1.0)]];
        let made = Grid { rows: vec!["a".into(), "b".into()], values, columns: vec![] };
        // One rectangle for each value and each shade; the scale has texts at both ends.
        let svg = grid("g", &made, |v| format!("value {v}"));
        assert_eq!(count(&svg, "<rect"), 3 + SHADES);
        assert!(count(&svg, ">value 0.1</text>") == 1 && count(&svg, ">value 1</text>") == 1);
        let none = Grid { rows: vec!["a".into()], values: vec![vec![None]], columns: vec![] };
        assert_eq!(count(&grid("g", &none, |v| v.to_string()), "<rect"), 0);
    }

    #[test]
    fn plots_leave_out_what_has_no_logarithm() {
        let point = |x, y| PlotPoint { x, y, class: "own", name: "p".into() };
        let points = vec![point(1.0, 1.0), point(10.0, 100.0), point(0.0, 1.0), point(1.0, f64::NAN)];
        let made =
            Plot { along: "x", up: "y", points, lines: vec![("roof", vec![(1.0, 1.0), (10.0, 10.0)])] };
        let svg = plot("p", &made);
        assert_eq!((count(&svg, "<circle"), count(&svg, "NaN"), count(&svg, "inf")), (2, 0, 0));
        let none = Plot { along: "x", up: "y", points: vec![], lines: vec![] };
        assert_eq!(count(&plot("p", &none), "<circle"), 0);
        assert_eq!(ticks(0.0, 1.0), [1.0, 2.0, 5.0, 10.0]);
        assert_eq!(ticks(0.0, 3.0), [1.0, 10.0, 100.0, 1000.0]);
        // Around one point of 8.4 no two of 1, 2, 5, 10 fit.
        assert_eq!(ticks(8.4f64.log10() - 0.2, 8.4f64.log10() + 0.2), [6.0, 8.0, 10.0, 12.0]);
        for x in [1e-6, 0.02, 3.0, 99.0, 1.01e5] {
            let around = ticks(f64::log10(x) - 0.2, f64::log10(x) + 0.2);
            assert!((3..=12).contains(&around.len()), "{x}: {around:?}");
        }
    }

    #[test]
    fn numbers_are_short() {
        let shown: Vec<String> = [0.0, 1e-5, 0.05, 3.25, 12.0, 1234.5, 2e7].map(short).to_vec();
        assert_eq!(shown, ["0", "1.0e-5", "0.05", "3.2", "12", "1234", "2.0e7"]);
    }
}
