//! Fakes of feature values, descriptions, providers, prediction options and configurations.

use crate::arrays::FakeArray;
use crate::faults::raise;
use anemoe_mlpackage::mil::{DataType, Feature, FeatureShape};
use objc_sim::{class, init};
use objc2::rc::{Allocated, Retained};
use objc2::runtime::AnyObject;
use objc2::{DefinedClass, Message};
use objc2_core_ml::{MLMultiArray, MLMultiArrayDataType};
use objc2_foundation::{NSCopying, NSDictionary, NSError, NSSet, NSString};
use std::cell::{Cell, RefCell};

type MultiArray = Retained<MLMultiArray>;

class!(FakeValue, "MLFeatureValue", MultiArray, {
    #[unsafe(method_id(featureValueWithMultiArray:))]
    fn with_array(array: &MLMultiArray) -> Retained<Self> {
        Self::new(array.retain())
    }
    #[unsafe(method_id(multiArrayValue))]
    fn multiArrayValue(&self) -> Option<Retained<MLMultiArray>> {
        Some(self.ivars().clone())
    }
});

impl FakeValue {
    pub fn array(&self) -> &FakeArray {
        FakeArray::behind(self.ivars())
    }
}

/// Returns the array type of a feature's element type.
pub(crate) fn kind_of(dtype: DataType) -> isize {
    match dtype {
        DataType::Float16 => MLMultiArrayDataType::Float16.0,
        DataType::Float32 => MLMultiArrayDataType::Float32.0,
        _ => MLMultiArrayDataType::Int32.0,
    }
}

/// Tells whether an array fits a feature.
pub(crate) fn fits(feature: &Feature, array: &FakeArray) -> bool {
    let shape: Vec<u64> = array.ivars().shape.iter().map(|&n| n as u64).collect();
    let has_shape = match &feature.shape {
        FeatureShape::Fixed(fixed) => *fixed == shape,
        FeatureShape::Enumerated(all) => all.contains(&shape),
        FeatureShape::Range { ranges, .. } => {
            shape.len() == ranges.len()
                && shape
                    .iter()
                    .zip(ranges)
                    .all(|(n, (low, high))| n >= low && high.is_none_or(|high| *n <= high))
        }
        FeatureShape::Dynamic => true,
    };
    has_shape && array.ivars().kind == kind_of(feature.dtype)
}

class!(FakeFeature, "MLFeatureDescription", Feature, {
    #[unsafe(method(isAllowedValue:))]
    fn isAllowed(&self, value: &FakeValue) -> bool {
        fits(self.ivars(), value.array())
    }
});

type Values = Retained<NSDictionary<NSString, AnyObject>>;

class!(FakeProvider, "MLDictionaryFeatureProvider", Values, {
    #[unsafe(method_id(initWithDictionary:error:))]
    fn initWithDictionary(
        this: Allocated<Self>,
        values: &NSDictionary<NSString, AnyObject>,
        _error: *mut *mut NSError,
    ) -> Option<Retained<Self>> {
        Some(init!(this, values.retain()))
    }
    #[unsafe(method_id(featureNames))]
    fn featureNames(&self) -> Retained<NSSet<NSString>> {
        NSSet::from_retained_slice(&self.ivars().keys().collect::<Vec<_>>())
    }
    #[unsafe(method_id(featureValueForName:))]
    fn featureValueForName(&self, name: &NSString) -> Option<Retained<AnyObject>> {
        self.ivars().objectForKey(name)
    }
});

/// Values by name that a prediction gives; a class of its own, so that tests can count the dictionaries of callers.
type Results = Vec<(String, Retained<FakeValue>)>;

class!(FakeResult, "FakePredictionResult", Results, {
    #[unsafe(method_id(featureNames))]
    fn featureNames(&self) -> Retained<NSSet<NSString>> {
        let names: Vec<_> = self.ivars().iter().map(|(name, _)| NSString::from_str(name)).collect();
        NSSet::from_retained_slice(&names)
    }
    #[unsafe(method_id(featureValueForName:))]
    fn featureValueForName(&self, name: &NSString) -> Option<Retained<FakeValue>> {
        let name = name.to_string();
        self.ivars().iter().find(|(own, _)| *own == name).map(|(_, value)| value.clone())
    }
});

type Backings = RefCell<Option<Values>>;

class!(FakeOptions, "MLPredictionOptions", Backings, {
    #[unsafe(method_id(init))]
    fn init(this: Allocated<Self>) -> Retained<Self> {
        init!(this, RefCell::new(None))
    }
    #[unsafe(method(setOutputBackings:))]
    fn set(&self, backings: &NSDictionary<NSString, AnyObject>) {
        *self.ivars().borrow_mut() = Some(backings.copy());
    }
});

impl FakeOptions {
    /// Returns the array that an output should be written to.
    pub fn backing(&self, name: &str) -> Option<Retained<MLMultiArray>> {
        let backings = self.ivars().borrow();
        let backing = backings.as_ref()?.objectForKey(&NSString::from_str(name))?;
        Some(backing.downcast().unwrap_or_else(|other| raise(&format!("a backing is {other:?}"))))
    }
}

#[derive(Default)]
pub(crate) struct ConfigurationIvars {
    pub units: Cell<isize>,
    pub function: RefCell<Option<String>>,
}

class!(FakeConfiguration, "MLModelConfiguration", ConfigurationIvars, {
    #[unsafe(method_id(init))]
    fn init(this: Allocated<Self>) -> Retained<Self> {
        init!(this, ConfigurationIvars { units: Cell::new(2), ..Default::default() })
    }
    #[unsafe(method(setComputeUnits:))]
    fn setComputeUnits(&self, units: isize) {
        self.ivars().units.set(units);
    }
    #[unsafe(method(setFunctionName:))]
    fn setFunctionName(&self, name: Option<&NSString>) {
        *self.ivars().function.borrow_mut() = name.map(ToString::to_string);
    }
});
