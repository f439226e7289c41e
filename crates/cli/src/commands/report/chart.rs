//! Charts as SVG: a map of bars, a grid of colours, and points over two axes. Colours are classes, which the page's style gives a
//! light and a dark form.

use super::markup::Markup;

/// Width of every chart.
const WIDTH: f64 = 920.0;
/// Room for names on the left.
const LEFT: f64 = 90.0;
/// Room on the right.
const RIGHT: f64 = 20.0;
/// Colours of a grid, `h0` to `h9`.
const SHADES: usize = 10;

/// One bar of a map.
pub struct MapBar {
    /// Row that it stands in.
    pub row: String,
    /// Length.
    pub size: f64,
    /// Class of its colour.
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
    svg.raw("</svg>");
    svg
}

/// A grid of values: one row for each name.
pub struct Grid {
    /// Names of rows.
    pub rows: Vec<String>,
    /// Values, row by row; none where there is no value.
    pub values: Vec<Vec<Option<f64>>>,
    /// Names of columns where there are few, else nothing.
    pub columns: Vec<String>,
}

/// Draws a grid, coloured by the logarithm of its values: the larger, the stronger. `shown` writes a value for the pointer.
pub fn grid(label: &str, grid: &Grid, shown: impl Fn(f64) -> String) -> Markup {
    let columns = grid.values.iter().map(Vec::len).max().unwrap_or(0).max(1);
    let row_height = 14.0;
    let head = if grid.columns.is_empty() { 0.0 } else { 18.0 };
    let width = ((WIDTH - LEFT - RIGHT) / columns as f64).min(120.0);
    let range = log_range(grid.values.iter().flatten().flatten().copied());
    let mut svg = open(label, head + row_height * grid.rows.len() as f64 + 4.0);
    for (i, column) in grid.columns.iter().enumerate() {
        svg.raw("<text class=\"tick\"")
            .at("x", LEFT + i as f64 * width + 2.0)
            .at("y", 12.0)
            .raw(">")
            .text(column)
            .raw("</text>");
    }
    for (i, (row, values)) in grid.rows.iter().zip(&grid.values).enumerate() {
        let y = head + i as f64 * row_height;
        name(&mut svg, y + 11.0, row);
        for (j, value) in values.iter().enumerate() {
            let Some(value) = value else { continue };
            let class = shade(*value, range);
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
    svg.raw("</svg>");
    svg
}

/// Logarithms of the smallest and the largest positive value.
fn log_range(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let mut range = (f64::INFINITY, f64::NEG_INFINITY);
    for log in values.filter(|v| *v > 0.0 && v.is_finite()).map(f64::log10) {
        range = (range.0.min(log), range.1.max(log));
    }
    range
}

fn shade(value: f64, (low, high): (f64, f64)) -> &'static str {
    const CLASSES: [&str; SHADES] = ["h0", "h1", "h2", "h3", "h4", "h5", "h6", "h7", "h8", "h9"];
    if !(value > 0.0 && value.is_finite() && high > low) {
        return CLASSES[0];
    }
    let share = (value.log10() - low) / (high - low);
    CLASSES[((share * SHADES as f64) as usize).min(SHADES - 1)]
}

/// A point of a plot.
pub struct PlotPoint {
    /// Place along.
    pub x: f64,
    /// Place up.
    pub y: f64,
    /// Class of its colour.
    pub class: &'static str,
    /// Text beside it.
    pub name: String,
}

/// A plot of points and lines over two logarithmic axes.
pub struct Plot {
    /// Name of the horizontal axis.
    pub along: &'static str,
    /// Name of the vertical axis.
    pub up: &'static str,
    /// Points; others than positive ones are left out.
    pub points: Vec<PlotPoint>,
    /// Lines by their class.
    pub lines: Vec<(&'static str, Vec<(f64, f64)>)>,
}

/// Draws a plot.
pub fn plot(label: &str, plot: &Plot) -> Markup {
    const HEIGHT: f64 = 340.0;
    const FOOT: f64 = 40.0;
    let is_shown = |x: f64, y: f64| x > 0.0 && y > 0.0 && x.is_finite() && y.is_finite();
    let points: Vec<&PlotPoint> = plot.points.iter().filter(|p| is_shown(p.x, p.y)).collect();
    let nodes = || plot.lines.iter().flat_map(|(_, nodes)| nodes).filter(|(x, y)| is_shown(*x, *y));
    // Room enough for a tick or two around a single point.
    let widen = |(low, high): (f64, f64)| if low <= high { (low - 0.2, high + 0.2) } else { (0.0, 1.0) };
    let (x0, x1) = widen(log_range(points.iter().map(|p| p.x).chain(nodes().map(|n| n.0))));
    let (y0, y1) = widen(log_range(points.iter().map(|p| p.y).chain(nodes().map(|n| n.1))));
    let place = |x: f64, y: f64| {
        let along = LEFT + (x.log10() - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT - 120.0);
        (along, (HEIGHT - FOOT) - (y.log10() - y0) / (y1 - y0) * (HEIGHT - FOOT - 14.0))
    };
    let mut svg = open(label, HEIGHT);
    for tick in ticks(x0, x1) {
        let (x, _) = place(tick, 1.0);
        line(&mut svg, "rule", [(x, 14.0), (x, HEIGHT - FOOT)]);
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
    svg.raw("<text class=\"tick\"").at("x", 4.0).at("y", 10.0).raw(">").raw(plot.up).raw("</text></svg>");
    svg
}

/// Values 1, 2 and 5 times powers of ten between two logarithms, or the powers alone where those are many.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let steps: &[f64] = if high - low > 2.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
    let powers = (low.floor() as i32..=high.ceil() as i32).map(|p| 10f64.powi(p));
    let all = powers.flat_map(|p| steps.iter().map(move |s| s * p));
    all.filter(|v| (low..=high).contains(&v.log10())).take(40).collect()
}

/// A number in a few characters.
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
    svg.raw("<svg role=\"img\" viewBox=\"0 0 ")
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
        assert!(text.contains("&lt;b&gt;") && text.contains("a &quot;map&quot;") && text.ends_with("</svg>"));
        // The longest row fills the width, the other one half of it.
        assert!(text.contains("width=\"606.5\"") && text.contains("width=\"404.0\""), "{text}");
        assert_eq!(count(&bar_map("empty", &[]), "<rect"), 0);
    }

    #[test]
    fn grids_shade_by_the_logarithm() {
        assert_eq!(shade(1e-4, (-4.0, 0.0)), "h0");
        assert_eq!(shade(1e-2, (-4.0, 0.0)), "h5");
        assert_eq!(shade(1.0, (-4.0, 0.0)), "h9");
        for odd in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(shade(odd, (-4.0, 0.0)), "h0");
        }
        let values = vec![vec![Some(0.1), None], vec![Some(0.0), Some(1.0)]];
        let made = Grid { rows: vec!["a".into(), "b".into()], values, columns: vec![] };
        assert_eq!(count(&grid("g", &made, |v| v.to_string()), "<rect"), 3);
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
    }

    #[test]
    fn numbers_are_short() {
        let shown: Vec<String> = [0.0, 1e-5, 0.05, 3.25, 12.0, 1234.5, 2e7].map(short).to_vec();
        assert_eq!(shown, ["0", "1.0e-5", "0.05", "3.2", "12", "1234", "2.0e7"]);
    }
}
