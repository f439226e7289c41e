//! Power as `powermetrics` reads it: at rest, and while the bundle runs.

use crate::child_work::{Ended, Limit, Work, Worker};
use anemoe_gates::soak::RunFigures;
use serde::Serialize;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Samples at rest, one per second.
const AT_REST: u64 = 5;
/// Program that reads power.
const POWERMETRICS: &str = "powermetrics";

/// Power in milliwatts; none where `powermetrics` has no line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PowerMilliwatts {
    /// Neural Engine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ane: Option<f64>,
    /// Processor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<f64>,
    /// GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<f64>,
    /// Number of samples that are averaged.
    pub samples: usize,
}

impl PowerMilliwatts {
    /// Computes the sum of `self - at_rest` over the lines that both have, in milliwatts and at least 0, and returns the
    /// names of these lines. None if both have no line in common.
    fn above(&self, at_rest: &PowerMilliwatts) -> Option<(f64, Vec<&'static str>)> {
        let pairs =
            [("ane", self.ane, at_rest.ane), ("cpu", self.cpu, at_rest.cpu), ("gpu", self.gpu, at_rest.gpu)];
        let (mut more, mut counted) = (0.0, Vec::new());
        for (name, own, rest) in pairs {
            if let (Some(own), Some(rest)) = (own, rest) {
                more += own - rest;
                counted.push(name);
            }
        }
        (!counted.is_empty()).then_some((more.max(0.0), counted))
    }
}

/// Figures of the stage.
#[derive(Clone, Debug, Serialize)]
pub struct EnergyFigures {
    /// Power at rest.
    pub at_rest: PowerMilliwatts,
    /// Power while tokens of random prompts run through the bundle, with everything loaded.
    pub running: PowerMilliwatts,
    /// Tokens per second while the bundle runs, over passes of all token counts.
    pub tok_s: f64,
    /// Millijoules per token above those at rest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mj_per_token: Option<f64>,
    /// Names of the lines that the millijoules count: `ane`, `cpu`, `gpu`.
    pub counted: Vec<&'static str>,
}

/// Result of a measurement.
pub enum PowerReading {
    /// Power was read.
    Measured(EnergyFigures),
    /// The bundle did not run.
    DidNotRun(String),
    /// Power cannot be read.
    Unreadable(String),
}

/// Measures power at rest, and while `work` runs a bundle. The second measurement begins after the first report of `work`,
/// when everything is loaded, and ends before `work` is told to stop. `limit` holds for the time before it, and for the end
/// of `work`.
///
/// # Errors
/// No process can be started.
pub fn measure(work: &Work, seconds: u64, limit: Duration) -> anyhow::Result<PowerReading> {
    let at_rest = match power(AT_REST) {
        Ok(power) => power,
        Err(why) => return Ok(PowerReading::Unreadable(why)),
    };
    let mut worker = Worker::start(work)?;
    if !worker.wait_for_progress(limit)? {
        // The child process has ended, or its time is over.
        let ended = worker.wait(Limit::Whole(limit))?;
        return Ok(PowerReading::DidNotRun(ended.reason()));
    }
    let running = power(seconds);
    worker.stop();
    let ended = worker.wait(Limit::Silence(limit))?;
    let Ended::Done(value) = ended else { return Ok(PowerReading::DidNotRun(ended.reason())) };
    let running = match running {
        Ok(power) => power,
        Err(why) => return Ok(PowerReading::Unreadable(why)),
    };
    let ran: RunFigures = serde_json::from_value(value)?;
    let tok_s = ran.tokens as f64 / ran.seconds.max(1e-9);
    let (mj_per_token, counted) = match running.above(&at_rest) {
        Some((more, counted)) => (Some(more / tok_s.max(1e-9)), counted),
        None => (None, Vec::new()),
    };
    Ok(PowerReading::Measured(EnergyFigures { at_rest, running, tok_s, mj_per_token, counted }))
}

/// Measures the mean power of samples, one per second; directly, or through `sudo` if that asks for no password.
fn power(samples: u64) -> Result<PowerMilliwatts, String> {
    let n = samples.to_string();
    let arguments = ["--samplers", "cpu_power", "-i", "1000", "-n", &n];
    let direct = said(POWERMETRICS, &arguments);
    let text = match direct {
        Ok(text) => text,
        Err(why) => {
            let through = [&["-n", POWERMETRICS][..], &arguments].concat();
            said("sudo", &through).map_err(|_| {
                format!("power needs root: {POWERMETRICS} said `{why}`; run `sudo -v` first, or the command itself with sudo")
            })?
        }
    };
    read_power(&text).ok_or_else(|| {
        format!("{POWERMETRICS} has no line of the power of ANE, CPU or GPU, such as `ANE Power: 123 mW`")
    })
}

/// Runs a program and returns its standard output; the error is the last line of its standard error.
fn said(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.map_err(|e| format!("{program}: {e}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(words.lines().last().unwrap_or("it failed").trim().chars().take(200).collect())
}

/// Averages the values of lines such as `ANE Power: 123 mW`; none without any such line.
fn read_power(text: &str) -> Option<PowerMilliwatts> {
    let mut samples = 0;
    let mut mean = |name: &str| {
        let value = |line: &str| {
            line.trim().strip_prefix(name)?.trim().strip_suffix("mW")?.trim().parse::<f64>().ok()
        };
        let all: Vec<f64> = text.lines().filter_map(value).filter(|v| v.is_finite()).collect();
        samples = samples.max(all.len());
        (!all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64)
    };
    let (ane, cpu, gpu) = (mean("ANE Power:"), mean("CPU Power:"), mean("GPU Power:"));
    (samples > 0).then_some(PowerMilliwatts { ane, cpu, gpu, samples })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_averaged_and_combined_lines_left_alone() {
        let text = "CPU Power: 100 mW\nGPU Power: 10 mW\nANE Power: 50 mW\nCombined Power (CPU + GPU + ANE): 160 mW\n\
                    CPU Power: 300 mW\nGPU Power: 30 mW\nANE Power: 70 mW\n";
        let power = read_power(text).unwrap();
        let wanted = PowerMilliwatts { ane: Some(60.0), cpu: Some(200.0), gpu: Some(20.0), samples: 2 };
        assert_eq!(power, wanted);
    }

    #[test]
    fn lines_that_are_there_suffice_and_none_is_an_error() {
        let cpu = read_power("CPU Power: 1 mW\n").unwrap();
        assert_eq!(cpu, PowerMilliwatts { cpu: Some(1.0), samples: 1, ..PowerMilliwatts::default() });
        let no_gpu = read_power("CPU Power: 5 mW\nANE Power: 9 mW\nCPU Power: 7 mW\n").unwrap();
        assert_eq!((no_gpu.ane, no_gpu.cpu, no_gpu.gpu, no_gpu.samples), (Some(9.0), Some(6.0), None, 2));
        // A line that only one of two readings has does not count.
        assert_eq!(no_gpu.above(&cpu), Some((5.0, vec!["cpu"])));
        assert_eq!(no_gpu.above(&PowerMilliwatts::default()), None);
        assert_eq!(read_power("Combined Power (CPU + GPU + ANE): 160 mW\nGPU Power: none\n"), None);
    }
}
