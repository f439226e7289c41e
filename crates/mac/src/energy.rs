//! Power as `powermetrics` reads it: at rest, and while the bundle runs.

use crate::child::{Ended, STOP, Work, Worker, from_value};
use anemoe_coreml::causes::End;
use anemoe_io::Result;
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Samples at rest, one per second.
const AT_REST: u64 = 5;
const POWERMETRICS: &str = "powermetrics";
/// Lines of power, and their names.
const LINES: [(&str, &str); 3] = [("ANE Power:", "ane"), ("CPU Power:", "cpu"), ("GPU Power:", "gpu")];

/// Mean power of each line that `powermetrics` has, in milliwatts.
#[derive(Debug, PartialEq, Serialize)]
struct PowerReading {
    #[serde(flatten)]
    lines: BTreeMap<&'static str, f64>,
    samples: usize,
}

impl PowerReading {
    /// Computes the sum of `self - at_rest` over the lines that both have, at least 0, and lists these lines.
    fn above(&self, at_rest: &PowerReading) -> (f64, Vec<&'static str>) {
        let both = self.lines.iter().filter_map(|(name, mw)| Some((*name, mw - at_rest.lines.get(name)?)));
        let (names, more): (Vec<_>, Vec<f64>) = both.unzip();
        (more.iter().sum::<f64>().max(0.0), names)
    }
}

/// Measures power at rest, and while tokens of random prompts run through a bundle. The second measurement begins when
/// everything is loaded, and ends before the bundle does. `limit` holds for the time before it, and for the end of the
/// run. Power that cannot be read skips the stage.
pub fn measure_energy(bundle: &Path, seconds: u64, limit: Duration) -> Result<Ended> {
    let skipped = |why: String| Ok(Ended::new(End::Skipped, why));
    let at_rest = match power(AT_REST) {
        Ok(power) => power,
        Err(why) => return skipped(why),
    };
    let mut worker = Worker::start(&Work::Run { bundle: bundle.into() })?;
    // Without progress the child process has ended, or its time is over.
    let running = worker.wait_for_progress(limit).then(|| power(seconds));
    worker.tell(STOP);
    let ended = worker.wait(limit)?;
    let (Some(running), End::Done) = (running, ended.end) else {
        let what = format!("the model did not run while power was measured: {}", ended.reason);
        return Ok(Ended::new(End::Failed, what));
    };
    let running = match running {
        Ok(power) => power,
        Err(why) => return skipped(why),
    };
    // Over passes of all token counts.
    let tok_s: f64 = from_value(ended.document)?;
    let (more, counted) = running.above(&at_rest);
    let mut document = json!({"at_rest": at_rest, "running": running, "tok_s": tok_s});
    if !counted.is_empty() {
        // Above those at rest, of the lines that are `counted`.
        document["mj_per_token"] = json!(more / tok_s.max(1e-9));
    }
    document["counted"] = json!(counted);
    Ok(Ended::with_faults(String::new(), document))
}

/// Measures the mean power of samples, one per second; directly, or through `sudo` if that asks for no password.
fn power(samples: u64) -> std::result::Result<PowerReading, String> {
    let n = samples.to_string();
    let arguments = ["--samplers", "cpu_power", "-i", "1000", "-n", &n];
    let text = said(POWERMETRICS, &arguments).or_else(|why| {
        said("sudo", &[&["-n", POWERMETRICS][..], &arguments].concat()).map_err(|_| {
            format!("power needs root: {POWERMETRICS} said `{why}`; run `sudo -v` first, or the command itself with sudo")
        })
    })?;
    read_power(&text).ok_or_else(|| {
        format!("{POWERMETRICS} has no line of the power of ANE, CPU or GPU, such as `ANE Power: 123 mW`")
    })
}

/// Runs a program and returns its standard output; the error is the last line of its standard error.
pub fn said(program: &str, arguments: &[&str]) -> std::result::Result<String, String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.map_err(|e| format!("{program}: {e}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(words.lines().last().unwrap_or("it failed").trim().chars().take(200).collect())
}

/// Averages the values of lines such as `ANE Power: 123 mW`; none without any such line.
fn read_power(text: &str) -> Option<PowerReading> {
    let mut found = PowerReading { lines: BTreeMap::new(), samples: 0 };
    for (begins, name) in LINES {
        let value = |line: &str| {
            line.trim().strip_prefix(begins)?.trim().strip_suffix("mW")?.trim().parse::<f64>().ok()
        };
        let all: Vec<f64> = text.lines().filter_map(value).filter(|v| v.is_finite()).collect();
        found.samples = found.samples.max(all.len());
        if !all.is_empty() {
            found.lines.insert(name, all.iter().sum::<f64>() / all.len() as f64);
        }
    }
    (found.samples > 0).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_averaged_and_combined_lines_left_alone() {
        let text = "CPU Power: 100 mW\nGPU Power: 10 mW\nANE Power: 50 mW\nCombined Power (CPU + GPU + ANE): 160 mW\n\
                    CPU Power: 300 mW\nGPU Power: 30 mW\nANE Power: 70 mW\n";
        let power = read_power(text).unwrap();
        assert_eq!(
            power,
            PowerReading { lines: [("ane", 60.0), ("cpu", 200.0), ("gpu", 20.0)].into(), samples: 2 }
        );
    }

    #[test]
    fn lines_that_are_there_suffice_and_none_is_an_error() {
        let cpu = read_power("CPU Power: 1 mW\n").unwrap();
        assert_eq!(cpu, PowerReading { lines: [("cpu", 1.0)].into(), samples: 1 });
        let no_gpu = read_power("CPU Power: 5 mW\nANE Power: 9 mW\nCPU Power: 7 mW\n").unwrap();
        assert_eq!(no_gpu, PowerReading { lines: [("ane", 9.0), ("cpu", 6.0)].into(), samples: 2 });
        // A line that only one of two readings has does not count.
        assert_eq!(no_gpu.above(&cpu), (5.0, vec!["cpu"]));
        assert!(no_gpu.above(&PowerReading { lines: BTreeMap::new(), samples: 1 }).1.is_empty());
        assert_eq!(read_power("Combined Power (CPU + GPU + ANE): 160 mW\nGPU Power: none\n"), None);
    }
}
