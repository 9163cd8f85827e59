//! The date, as chat templates may ask for it.

/// A moment on a wall clock. Whoever renders a template passes it in: this room has no clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct LocalTime {
    pub year: i32,
    /// 1 to 12.
    pub month: u32,
    /// 1 to 31.
    pub day: u32,
    pub hour: u32,
    pub minute: u32,
    pub second: u32,
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

impl LocalTime {
    /// From seconds since 1970-01-01 00:00 on the wall clock in question (so, with the zone's offset added).
    pub fn from_unix(seconds: i64) -> Self {
        let (days, rest) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400) as u32);
        // Eras of 400 years, counted from a first of March, so that the leap day is a year's last.
        let days = days + 719_468;
        let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
        let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_year + 2) / 153;
        let day = (day_of_year - (153 * month_from_march + 2) / 5 + 1) as u32;
        let month = (if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 }) as u32;
        let year = (year_of_era + era * 400 + i64::from(month <= 2)) as i32;
        Self { year, month, day, hour: rest / 3_600, minute: rest / 60 % 60, second: rest % 60 }
    }

    /// Python's `strftime` in the C locale; codes it does not know stay as they are.
    pub fn format(&self, format: &str) -> String {
        let mut out = String::with_capacity(format.len() + 16);
        let mut letters = format.chars().peekable();
        while let Some(letter) = letters.next() {
            if letter != '%' {
                out.push(letter);
                continue;
            }
            let flag = letters.next_if(|letter| "-_0^".contains(*letter));
            let code = letters.next();
            match code.filter(|&code| self.push_code(code, flag, &mut out)) {
                Some(_) => {}
                None => out.extend(['%'].into_iter().chain(flag).chain(code)),
            }
        }
        out
    }

    /// Writes what a code stands for; false for one that is not known.
    fn push_code(&self, code: char, flag: Option<char>, out: &mut String) -> bool {
        if let Some((value, width, fill)) = self.number(code) {
            out.push_str(&match flag.unwrap_or(fill) {
                '-' => value.to_string(),
                '_' | ' ' => format!("{value:width$}"),
                _ => format!("{value:0width$}"),
            });
            return true;
        }
        let text = match code {
            'Y' => self.year.to_string(),
            'B' => self.month_name().to_owned(),
            'b' | 'h' => self.month_name()[..3].to_owned(),
            'A' => DAYS[self.weekday()].to_owned(),
            'a' => DAYS[self.weekday()][..3].to_owned(),
            'p' => if self.hour < 12 { "AM" } else { "PM" }.to_owned(),
            'P' => if self.hour < 12 { "am" } else { "pm" }.to_owned(),
            'F' => self.format("%Y-%m-%d"),
            'T' | 'X' => self.format("%H:%M:%S"),
            'R' => self.format("%H:%M"),
            'r' => self.format("%I:%M:%S %p"),
            'D' | 'x' => self.format("%m/%d/%y"),
            'c' => self.format("%a %b %e %H:%M:%S %Y"),
            'z' | 'Z' => String::new(), // a naive time, as in the reference
            'n' => "\n".to_owned(),
            't' => "\t".to_owned(),
            '%' => "%".to_owned(),
            _ => return false,
        };
        out.push_str(&if flag == Some('^') { text.to_uppercase() } else { text });
        true
    }

    /// The number that a code stands for, how wide it is, and what fills it up.
    fn number(&self, code: char) -> Option<(u32, usize, char)> {
        let hour12 = (self.hour + 11) % 12 + 1;
        let week_from = |first: usize| (self.day_of_year() + 6 - ((self.weekday() + 7 - first) % 7) as u32) / 7;
        Some(match code {
            'd' => (self.day, 2, '0'),
            'm' => (self.month, 2, '0'),
            'y' => (self.year.rem_euclid(100) as u32, 2, '0'),
            'H' => (self.hour, 2, '0'),
            'I' => (hour12, 2, '0'),
            'M' => (self.minute, 2, '0'),
            'S' => (self.second, 2, '0'),
            'j' => (self.day_of_year(), 3, '0'),
            'w' => ((self.weekday() as u32 + 1) % 7, 1, '0'),
            'u' => (self.weekday() as u32 + 1, 1, '0'),
            'f' => (0, 6, '0'),
            'e' => (self.day, 2, ' '),
            'k' => (self.hour, 2, ' '),
            'l' => (hour12, 2, ' '),
            'U' => (week_from(6), 2, '0'),
            'W' => (week_from(0), 2, '0'),
            _ => return None,
        })
    }

    fn month_name(&self) -> &'static str {
        MONTHS[(self.month.clamp(1, 12) - 1) as usize]
    }

    fn day_of_year(&self) -> u32 {
        let leap = self.year % 4 == 0 && (self.year % 100 != 0 || self.year % 400 == 0);
        let lengths = [31, 28 + u32::from(leap), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        lengths[..(self.month.clamp(1, 12) - 1) as usize].iter().sum::<u32>() + self.day
    }

    /// 0 is Monday.
    fn weekday(&self) -> usize {
        let before = i64::from(self.year) - 1;
        let days = before * 365 + before.div_euclid(4) - before.div_euclid(100)
            + before.div_euclid(400)
            + i64::from(self.day_of_year())
            - 1;
        days.rem_euclid(7) as usize // 0001-01-01 was a Monday
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_as_python_does() {
        let time = LocalTime { year: 2025, month: 3, day: 4, hour: 5, minute: 6, second: 7 };
        assert_eq!(
            time.format("%Y-%m-%d %d %b %Y %H:%M:%S %A %B %j"),
            "2025-03-04 04 Mar 2025 05:06:07 Tuesday March 063"
        );
        assert_eq!(time.format("%-d/%-m %e %I%p %% %q %"), "4/3  4 05AM % %q %");
    }

    #[test]
    fn counts_from_1970() {
        for (seconds, want) in [
            (0, "1970-01-01 00:00:00 Thursday 001"),
            (951_782_400, "2000-02-29 00:00:00 Tuesday 060"),
            (1_735_689_599, "2024-12-31 23:59:59 Tuesday 366"),
            (-1, "1969-12-31 23:59:59 Wednesday 365"),
            (4_107_542_400, "2100-03-01 00:00:00 Monday 060"),
        ] {
            assert_eq!(LocalTime::from_unix(seconds).format("%F %T %A %j"), want);
        }
    }

    #[test]
    fn counts_weeks_from_sundays_and_mondays() {
        for (year, month, day, want) in
            [(2025, 3, 4, "09 09"), (2025, 1, 1, "00 00"), (2023, 1, 1, "01 00"), (2024, 12, 31, "52 53")]
        {
            let time = LocalTime { year, month, day, hour: 0, minute: 0, second: 0 };
            assert_eq!(time.format("%U %W"), want);
        }
    }
}
