//! Draws the plots of `docs/results.md` from `docs/results.json`.
//!
//! ```text
//! bars     [group, [[lowest, middle, highest] for each series]]
//! points   [label, x, [y or null for each series]], y on a logarithmic axis
//! ```

use crate::task::{Passed, root};
use serde_json::Value;
use std::error::Error;
use std::fs;

/// Width and height of a plot in pixels, and the margins around its axes.
const SIZE: [f64; 2] = [640.0, 340.0];
const LEFT: f64 = 50.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 62.0;
const BOTTOM: f64 = 50.0;
/// Style sheet for light and dark pages.
const STYLE: &str = "text { font: 12px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #333c46; }
  .t { font-size: 14px; font-weight: 600; } .page { fill: #ffffff; } .l { stroke: #a4afba; } .w { stroke: #333c46; }
  .s0 { fill: #98a4b1; } .s1 { fill: #3d7fc4; } .s2 { fill: #d98b2b; } .s3 { fill: #4f9d5d; }
  @media (prefers-color-scheme: dark) { text { fill: #d5dde5; } .page { fill: #14181d; } .l { stroke: #58636f; } .w { stroke: #d5dde5; } }";

/// Writes every plot to `docs/plots`.
pub fn write() -> Passed {
    let folder = root().join("docs/plots");
    fs::create_dir_all(&folder)?;
    for (file, svg) in draw_all()? {
        fs::write(folder.join(file), svg)?;
    }
    Ok(true)
}

/// Draws every plot. Returns file names and SVG texts.
fn draw_all() -> Result<Vec<(String, String)>, Box<dyn Error>> {
    let results: Value = serde_json::from_str(&fs::read_to_string(root().join("docs/results.json"))?)?;
    let plots = results["plots"].as_array().ok_or("results.json: no list of plots")?;
    let draw = |plot: &Value| {
        draw(plot).ok_or_else(|| format!("results.json: {} has another form", plot["file"]).into())
    };
    plots.iter().map(draw).collect()
}

fn draw(plot: &Value) -> Option<(String, String)> {
    let ([width, height], title) = (SIZE, plot["title"].as_str()?);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\">\n\
         <title>{title}</title>\n<style>{STYLE}</style>\n<rect class=\"page\" width=\"{width}\" height=\"{height}\"/>\n\
         <text class=\"t\" x=\"14\" y=\"22\">{title}</text>\n",
    );
    let (colour, drawn) = match plot["bars"].as_array() {
        Some(groups) => (0, bars(groups)?),
        None => (1, points(plot["points"].as_array()?)?),
    };
    for (i, name) in plot["series"].as_array()?.iter().enumerate() {
        let x = 14.0 + 110.0 * i as f64;
        let s = i + colour;
        svg += &format!("<rect class=\"s{s}\" x=\"{x}\" y=\"34\" width=\"12\" height=\"12\" rx=\"2\"/>\n");
        svg += &label(x + 18.0, 44.0, "start", name.as_str()?);
    }
    svg += &label(14.0, height - 12.0, "start", plot["note"].as_str()?);
    Some((plot["file"].as_str()?.to_string(), svg + &drawn + "</svg>\n"))
}

fn label(x: f64, y: f64, anchor: &str, text: &str) -> String {
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>\n")
}

/// Draws a horizontal grid line with its label.
fn grid(y: f64, text: &str) -> String {
    let right = SIZE[0] - RIGHT;
    format!("<path class=\"l\" d=\"M{LEFT} {y:.1}H{right}\"/>\n") + &label(LEFT - 6.0, y + 4.0, "end", text)
}

fn bars(groups: &[Value]) -> Option<String> {
    let heights = |group: &Value| -> Option<Vec<[f64; 3]>> {
        let three = |v: &Value| Some([v[0].as_f64()?, v[1].as_f64()?, v[2].as_f64()?]);
        group[1].as_array()?.iter().map(three).collect()
    };
    let all: Vec<_> = groups.iter().map(|g| Some((g[0].as_str()?, heights(g)?))).collect::<Option<_>>()?;
    let highest = all.iter().flat_map(|(_, v)| v).map(|v| v[2]).fold(0.0, f64::max);
    let step = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0].into_iter().find(|s| highest / s <= 6.0).unwrap_or(100.0);
    let (steps, floor) = ((highest / step).ceil(), SIZE[1] - BOTTOM);
    let y = |v: f64| floor - v / (steps * step) * (floor - TOP);
    let lines = (0..=steps as usize).map(|i| i as f64 * step);
    let mut svg: String = lines.map(|v| grid(y(v), &v.to_string())).collect();
    let room = (SIZE[0] - LEFT - RIGHT) / all.len() as f64;
    for (g, (name, values)) in all.iter().enumerate() {
        let (middle, wide) = (LEFT + room * (g as f64 + 0.5), room * 0.7 / values.len() as f64);
        svg += &label(middle, floor + 18.0, "middle", name);
        for (s, &[low, value, high]) in values.iter().enumerate() {
            let x = middle + wide * (s as f64 + 0.5 - values.len() as f64 / 2.0);
            let (left, w, top, h) = (x - wide / 2.0 + 3.0, wide - 6.0, y(value), floor - y(value));
            svg += &format!("<path class=\"s{s}\" d=\"M{left:.1} {top:.1}h{w:.1}v{h:.1}h-{w:.1}z\"/>\n");
            svg += &format!("<path class=\"w\" d=\"M{x:.1} {:.1}V{:.1}\"/>\n", y(low), y(high));
            svg += &label(x, y(high) - 5.0, "middle", &format!("{value:.1}"));
        }
    }
    Some(svg)
}

fn points(all: &[Value]) -> Option<String> {
    let values = |point: &Value| {
        point[2].as_array().into_iter().flatten().filter_map(Value::as_f64).collect::<Vec<_>>()
    };
    let xs: Vec<f64> = all.iter().map(|p| p[1].as_f64()).collect::<Option<_>>()?;
    let ys: Vec<f64> = all.iter().flat_map(values).map(f64::log10).collect();
    let right = xs.iter().copied().fold(0.0, f64::max).ceil() + 2.0;
    let low = ys.iter().copied().fold(f64::MAX, f64::min).floor();
    let high = ys.iter().copied().fold(f64::MIN, f64::max).ceil();
    let floor = SIZE[1] - BOTTOM;
    let x = |v: f64| LEFT + v / right * (SIZE[0] - LEFT - RIGHT);
    let y = |log: f64| floor - (log - low) / (high - low) * (floor - TOP);
    let mut svg: String =
        (low as i32..=high as i32).map(|e| grid(y(f64::from(e)), &format!("1e{e}"))).collect();
    for mb in (0..=right as usize).step_by(2) {
        svg += &label(x(mb as f64), floor + 18.0, "middle", &mb.to_string());
    }
    for (point, px) in all.iter().zip(xs.into_iter().map(x)) {
        for (s, value) in point[2].as_array()?.iter().enumerate() {
            let Some(py) = value.as_f64().map(|v| y(v.log10())) else { continue };
            svg += &format!("<circle class=\"s{}\" cx=\"{px:.1}\" cy=\"{py:.1}\" r=\"4.5\"/>\n", s + 1);
            svg += &label(px + 7.0, py - 3.0, "start", point[0].as_str()?);
        }
    }
    Some(svg)
}

#[test]
fn plots_are_those_of_the_results() {
    for (file, svg) in draw_all().unwrap() {
        let path = root().join("docs/plots").join(&file);
        assert_eq!(fs::read_to_string(path).unwrap(), svg, "cargo xtask plots: {file}");
    }
}
