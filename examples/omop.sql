-- Who: adults whose first stay in hospital (9201) with heart failure (316139) began from 2020 to 2024, one row each,
--      if their blood pressure was measured in the year before it ended.
-- What leaves the database: five columns, no dates, no identifiers.
WITH stay AS (
    SELECT v.person_id, v.visit_start_date, v.visit_end_date,
        row_number() OVER (PARTITION BY v.person_id ORDER BY v.visit_start_date, v.visit_occurrence_id) AS place
    FROM visit_occurrence v
    JOIN condition_occurrence c ON c.visit_occurrence_id = v.visit_occurrence_id
    WHERE v.visit_concept_id = 9201 AND c.condition_concept_id = 316139
        AND v.visit_start_date BETWEEN DATE '2020-01-01' AND DATE '2024-12-31'
),
pressure AS (  -- systolic (3004249), mmHg, the last one
    SELECT s.person_id, m.value_as_number AS systolic,
        row_number() OVER (PARTITION BY s.person_id ORDER BY m.measurement_date DESC, m.measurement_id DESC) AS place
    FROM stay s
    JOIN measurement m ON m.person_id = s.person_id
    WHERE s.place = 1 AND m.measurement_concept_id = 3004249
        AND m.measurement_date BETWEEN s.visit_end_date - INTERVAL '1' YEAR AND s.visit_end_date
)
SELECT
    EXISTS (  -- another stay in hospital within 30 days
        SELECT 1 FROM visit_occurrence again
        WHERE again.person_id = s.person_id AND again.visit_concept_id = 9201
            AND again.visit_start_date > s.visit_end_date
            AND again.visit_start_date <= s.visit_end_date + INTERVAL '30' DAY
    ) AS readmitted,
    EXTRACT(YEAR FROM s.visit_start_date) - p.year_of_birth AS age,
    CASE p.gender_concept_id WHEN 8532 THEN 'female' WHEN 8507 THEN 'male' END AS sex,
    EXISTS (  -- diabetes (201820), known by then
        SELECT 1 FROM condition_occurrence c
        WHERE c.person_id = s.person_id AND c.condition_concept_id = 201820
            AND c.condition_start_date <= s.visit_end_date
    ) AS diabetes,
    b.systolic
FROM stay s
JOIN person p ON p.person_id = s.person_id
JOIN pressure b ON b.person_id = s.person_id AND b.place = 1
WHERE s.place = 1 AND p.gender_concept_id IN (8532, 8507)
    AND EXTRACT(YEAR FROM s.visit_start_date) - p.year_of_birth >= 18
