//! Power, as `powermetrics` reads it: at rest, and while the bundle runs.

use crate::step::{Ended, Work, in_child};
use anemoe_gates::soak::SoakFigures;
use serde::Serialize;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

/// Seconds for which the bundle runs before power is read: it has to be loaded first.
pub const LEAD_SECONDS: u64 = 3;
/// Samples at rest.
const AT_REST: u64 = 5;
/// Program that reads power.
const POWERMETRICS: &str = "powermetrics";

/// Power in milliwatts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PowerMilliwatts {
    /// Neural Engine.
    pub ane: f64,
    /// Processor.
    pub cpu: f64,
    /// GPU.
    pub gpu: f64,
    /// Samples that are averaged.
    pub samples: usize,
}

impl PowerMilliwatts {
    fn sum(&self) -> f64 {
        self.ane + self.cpu + self.gpu
    }
}

/// Figures of the stage.
#[derive(Clone, Debug, Serialize)]
pub struct EnergyFigures {
    /// At rest.
    pub at_rest: PowerMilliwatts,
    /// While tokens of random prompts run through the bundle.
    pub running: PowerMilliwatts,
    /// Tokens a second meanwhile, passes of all token counts mixed.
    pub tok_s: f64,
    /// Millijoules for a token, those at rest left out.
    pub mj_per_token: f64,
    /// Reason for which the bundle did not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load_failed: Option<String>,
}

/// Measures power at rest and while `work`, a soak, is done; or says why power cannot be read.
///
/// # Errors
/// No process can be started.
pub fn measure(work: &Work, seconds: u64, limit: Duration) -> anyhow::Result<Result<EnergyFigures, String>> {
    let at_rest = match power(AT_REST) {
        Ok(power) => power,
        Err(why) => return Ok(Err(why)),
    };
    let (running, ended) = thread::scope(|scope| {
        let reader = scope.spawn(|| {
            thread::sleep(Duration::from_secs(LEAD_SECONDS));
            power(seconds)
        });
        let ended = in_child(work, limit);
        (reader.join().unwrap_or_else(|_| Err("the reader of power panicked".into())), ended)
    });
    let running = match running {
        Ok(power) => power,
        Err(why) => return Ok(Err(why)),
    };
    let failed = |why: String| EnergyFigures {
        at_rest,
        running,
        tok_s: 0.0,
        mj_per_token: 0.0,
        load_failed: Some(why),
    };
    Ok(Ok(match ended? {
        Ended::Done(value) => {
            let soaked: SoakFigures = serde_json::from_value(value)?;
            let tok_s = soaked.tokens as f64 / soaked.seconds.max(1e-9);
            let more = (running.sum() - at_rest.sum()).max(0.0);
            EnergyFigures { at_rest, running, tok_s, mj_per_token: more / tok_s.max(1e-9), load_failed: None }
        }
        Ended::Failed(what) => failed(what),
        Ended::Crashed { how, .. } => failed(how),
        late @ Ended::TimedOut { .. } => failed(late.reason()),
    }))
}

/// Mean power of so many samples of a second: directly, or through `sudo` where that asks for nothing.
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
    read_power(&text).ok_or_else(|| format!("{POWERMETRICS} says nothing of the power of ANE, CPU and GPU"))
}

/// Standard output of a program that ends well; else its last words.
fn said(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.map_err(|e| format!("{program}: {e}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(words.lines().last().unwrap_or("it failed").trim().chars().take(200).collect())
}

/// Reads lines such as `ANE Power: 123 mW`.
fn read_power(text: &str) -> Option<PowerMilliwatts> {
    let mean = |name: &str| {
        let value = |line: &str| {
            line.trim().strip_prefix(name)?.trim().strip_suffix("mW")?.trim().parse::<f64>().ok()
        };
        let all: Vec<f64> = text.lines().filter_map(value).filter(|v| v.is_finite()).collect();
        (!all.is_empty()).then(|| (all.iter().sum::<f64>() / all.len() as f64, all.len()))
    };
    let (ane, samples) = mean("ANE Power:")?;
    Some(PowerMilliwatts { ane, cpu: mean("CPU Power:")?.0, gpu: mean("GPU Power:")?.0, samples })
}

#[cfg(test)]
mod tests {
    use super::read_power;

    #[test]
    fn samples_are_averaged_and_combined_lines_left_alone() {
        let text = "CPU Power: 100 mW\nGPU Power: 10 mW\nANE Power: 50 mW\nCombined Power (CPU + GPU + ANE): 160 mW\n\
                    CPU Power: 300 mW\nGPU Power: 30 mW\nANE Power: 70 mW\n";
        let power = read_power(text).unwrap();
        assert_eq!((power.ane, power.cpu, power.gpu, power.samples), (60.0, 200.0, 20.0, 2));
        assert_eq!(read_power("CPU Power: 1 mW\n"), None);
    }
}
