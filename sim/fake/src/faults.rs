//! Faults that tests plant in models.

use objc2::rc::Retained;
use objc2::runtime::AnyObject;
use objc2_foundation::{NSDictionary, NSError, NSException, NSLocalizedDescriptionKey, NSString};
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

/// Defines the faults of a model, and their names in a file of faults.
macro_rules! faults {
    ($($(#[$doc:meta])* $text:literal $name:ident $(($number:ident))?)*) => {
        /// A fault of a model.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Fault {
            $($(#[$doc])* $name $(($number))?,)*
        }

        /// Returns the fault of this name, with the number `n`.
        fn named(name: &str, n: usize) -> Option<Fault> {
            match name {
                $($text => Some(Fault::$name $((n as $number))?),)*
                _ => None,
            }
        }
    };
}

faults! {
    /// Compiling the package fails.
    "not-compiled" NotCompiled
    /// Loading fails with -14 and Core ML's words for it.
    "no-plan" NoPlan
    /// Loading raises an exception.
    "load-exception" LoadException
    /// The handler of loading is dropped without a call.
    "no-answer" NoAnswer
    /// The handler of loading gets neither model nor error.
    "empty-answer" EmptyAnswer
    /// Predictions fail after this number of right ones.
    "error" Error(usize)
    /// Predictions raise exceptions after this number of right ones.
    "exception" Exception(usize)
    /// Results are new arrays, whatever backings are proposed.
    "no-backings" NoBackings
    /// Compiling the package ends the process.
    "compile-crash" CompileCrash
    /// Compiling the package never ends.
    "compile-hang" CompileHang
    /// Loading ends the process.
    "load-crash" LoadCrash
    /// Loading never ends.
    "load-hang" LoadHang
    /// Loading takes this many milliseconds more.
    "load-slow" LoadSlow(usize)
    /// A prediction ends the process after this number of right ones.
    "crash" Crash(usize)
    /// A prediction never ends after this number of right ones.
    "hang" Hang(usize)
    /// Predictions are wrong after this number of right ones.
    "wrong" Wrong(usize)
    /// Predictions are NaN after this number of right ones.
    "not-numbers" NotNumbers(usize)
    /// Predictions take this many microseconds more.
    "slow" Slow(usize)
    /// Each prediction leaks this many bytes.
    "leak" Leak(usize)
    /// The plan puts every op on the CPU.
    "plan-cpu" PlanCpu
    /// The plan puts products on the CPU, and everything else on the Neural Engine.
    "plan-products-cpu" PlanProductsCpu
    /// The plan has no device for any op.
    "plan-none" PlanNone
    /// The handler of the plan gets an error.
    "plan-error" PlanError
    /// Asking for the plan ends the process.
    "plan-crash" PlanCrash
    /// Asking for the plan with only the CPU allowed ends the process.
    "plan-cpu-crash" PlanCpuCrash
    /// The plan puts every op on the Neural Engine, whatever is allowed and whatever the op computes.
    "plan-ane" PlanAne
}

/// Plants the faults of a file. Each line has a part of the package's path, optionally with `#` and a function's name,
/// then the fault and its number, if it has one.
pub fn plant_from(file: &Path) {
    let text = std::fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let (Some(part), Some(name)) = (words.next(), words.next()) else { continue };
        let n = words.next().map_or(0, |n| n.parse().unwrap_or_else(|_| panic!("{line}: no number")));
        plant(part, named(name, n).unwrap_or_else(|| panic!("{line}: no such fault")));
    }
}

/// Adds a line to the file that `FAKE_COREML_LOG` names, if it is set.
pub(crate) fn log(line: &str) {
    let Some(file) = std::env::var_os("FAKE_COREML_LOG") else { return };
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(file).unwrap();
    std::io::Write::write_all(&mut file, format!("{line}\n").as_bytes()).unwrap();
}

/// Sleeps forever, like a hanging service.
pub(crate) fn hang() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

static FAULTS: Mutex<Vec<(String, Fault)>> = Mutex::new(Vec::new());

/// Plants a fault in every model whose package's path contains `part`, or with `part#FUNCTION` in that function alone.
pub fn plant(part: &str, fault: Fault) {
    FAULTS.lock().unwrap().push((part.into(), fault));
}

/// Removes all faults.
pub fn clear_faults() {
    FAULTS.lock().unwrap().clear();
}

/// Returns the faults of a whole package, without those of single functions.
pub(crate) fn faults(package: &Path) -> Vec<Fault> {
    faults_of(package, "")
}

/// Returns the faults that apply to a function of a package.
pub(crate) fn faults_of(package: &Path, function: &str) -> Vec<Fault> {
    let path = package.display().to_string();
    let hits = |planted: &str| match planted.split_once('#') {
        Some((part, own)) => path.contains(part) && own == function,
        None => path.contains(planted),
    };
    FAULTS.lock().unwrap().iter().filter(|(planted, _)| hits(planted)).map(|(_, fault)| *fault).collect()
}

/// Raises an Objective-C exception.
pub(crate) fn raise(reason: &str) -> ! {
    let name = NSString::from_str("NSInvalidArgumentException");
    let exception = NSException::new(&name, Some(&NSString::from_str(reason)), None).unwrap();
    // SAFETY: an NSException may be thrown.
    unsafe {
        let object: Retained<objc2::exception::Exception> = Retained::cast_unchecked(exception);
        objc2::exception::throw(object)
    }
}

/// Makes an autoreleased error, as Cocoa does. The error of an unbuildable execution plan has an underlying error with its cause.
pub(crate) fn error(code: isize, text: &str) -> *mut NSError {
    let below = text
        .contains("error code: -14")
        .then(|| make_error("com.apple.appleneuralengine", 7, "ANE model load failed: planted", None));
    Retained::autorelease_ptr(make_error("com.apple.CoreML", code, text, below.as_deref()))
}

fn make_error(domain: &str, code: isize, text: &str, below: Option<&NSError>) -> Retained<NSError> {
    let (text, key) = (NSString::from_str(text), NSString::from_str("NSUnderlyingError"));
    // SAFETY: registering the classes has set the key, and values are objects.
    unsafe {
        let mut keys: Vec<&NSString> = vec![NSLocalizedDescriptionKey];
        let mut values: Vec<&AnyObject> = vec![&*text as &AnyObject];
        if let Some(below) = below {
            keys.push(&key);
            values.push(below as &AnyObject);
        }
        let info = NSDictionary::<NSString, AnyObject>::from_slices(&keys, &values);
        NSError::errorWithDomain_code_userInfo(&NSString::from_str(domain), code, Some(&info))
    }
}
